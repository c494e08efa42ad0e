"""A real run, watched by a real Prometheus that `seedrl observe` started, and looked at with a real browser.

One run serves all tests, in the order they are written: first all is well, then checkpoints fail, an actor stops and
the learner is killed. The alerts are those of conf/observability, hurried: their windows last seconds.
"""

import json
import math
import os
import re
import signal
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from seedrl.commandline.settings import conf_directory
from seedrl.monitoring import dashboards
from seedrl.monitoring.panels import PANELS, TILES
from tests.browser import chromium, dom_of
from tests.fakes import make_spec
from tests.integration.processes import Commands, Process, saved_steps
from tests.integration.support import RawActor
from tests.integration.waiting import DEADLINE, eventually, free_address
from tests.programs import needed

pytestmark = pytest.mark.long

FILES = conf_directory() / "observability"
ENDLESS = ("stop.env_steps=1_000_000_000", "stop.return_mean_100=null", "checkpoint.seconds=0.5", "display=none")
WINDOW = "8s"
HURRY = 60  # alerts come so many times earlier


def hurried(rules: str) -> str:
    """The rules with windows and patience of seconds."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"s": 1, "m": 60, "h": 3600}[found[3]] / HURRY
        return f"{found[1]}{max(5 if found[1] == '[' else 1, math.ceil(seconds))}s"

    text = re.sub(r"(\[|offset |for: )(\d+)([smh])", shorter, rules)
    for slow, fast in (("_silence_seconds > 30", "_silence_seconds > 2"), ("_time_seconds > 120", "_time_seconds > 2")):
        assert slow in text
        text = text.replace(slow, fast)
    return text


class Watched:
    """The run, the Prometheus that watches it, and questions to the latter."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.listen, self.metrics, self.prometheus = free_address(), free_address(), free_address()
        self.run_dir, self._data = commands.directory / "run", commands.directory / "prometheus"
        self.run = self.start_run()
        self.observe = commands.start(
            "observe", f"metrics={self.metrics}", f"listen={self.prometheus}", f"data={self._data}"
        )
        self.observe.says(f"watching {self.metrics}")
        self._hurry()

    def start_run(self) -> Process:
        where = (f"listen={self.listen}", f"metrics={self.metrics}", f"run_dir={self.run_dir}")
        others = ("actors.evaluation=0.1", "max_restarts=0")  # a killed learner stays away
        return self.commands.start("run", *ENDLESS, *where, *others)

    def _hurry(self) -> None:
        """Gives Prometheus quicker rules than those it was started with."""
        rules, configuration = self._data / "rules.yml", self._data / "prometheus.yml"
        rules.write_text(hurried(rules.read_text()))
        configuration.write_text(re.sub(r"(_interval|_timeout): \d+s", r"\1: 1s", configuration.read_text()))
        (prometheus,) = self.observe.children()
        os.kill(prometheus, signal.SIGHUP)

    def page(self, path: str, **parameters: str) -> str:
        url = f"http://{self.prometheus}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            text: str = answer.read().decode()
        return text

    def ask(self, query: str) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = json.loads(self.page("/api/v1/query", query=query))["data"]["result"]
        return results

    def has_data(self, query: str) -> bool:
        return any(math.isfinite(float(result["value"][1])) for result in self.ask(query))

    def all_have_data(self, queries: list[str]) -> None:
        """Waits until each has; fails with those that have none."""
        missing = list(queries)

        def fewer() -> bool:
            missing[:] = [query for query in missing if not self.has_data(query)]
            return not missing

        try:
            eventually(fewer)
        except AssertionError:
            raise AssertionError("no data for\n" + "\n".join(missing)) from None

    def last(self, metric: str) -> float:
        """Return what was seen of it last, within a minute."""
        [result] = self.ask(f"last_over_time({metric}[1m])")
        return float(result["value"][1])

    def fires(self, alert: str) -> bool:
        return bool(self.ask(f'ALERTS{{alertname="{alert}",alertstate="firing"}}'))

    def kill_learner(self) -> None:
        (learner,) = [pid for pid, words in self.run.children("seedrl").items() if " learner " in words]
        os.kill(learner, signal.SIGKILL)

    def actor(self) -> int:
        pids = eventually(lambda: list(self.run.children("envs_server")))
        return int(pids[0])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    needed("prometheus")
    commands = Commands(tmp_path_factory.mktemp("watched"))
    try:
        yield Watched(commands)
    finally:
        commands.close()


def filled(query: str, watched: Watched) -> str:
    """With the values of all variables, of Grafana and of the console."""
    scope = f'job="seedrl",instance="{watched.metrics}"'
    for name, value in (("$scope", scope), ("$job", "seedrl"), ("$instance", watched.metrics)):
        query = query.replace(name, value)
    return query.replace("$__rate_interval", WINDOW).replace("$window", WINDOW)


# All is well


def test_every_panel_of_grafana_has_data(watched: Watched) -> None:
    dashboard = json.loads((FILES / dashboards.GRAFANA).read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(targets) > len(PANELS)
    watched.all_have_data([filled(target["expr"], watched) for target in targets])


def test_variables_of_grafana_find_the_learner(watched: Watched) -> None:
    [ready] = watched.ask("seedrl_ready")
    assert (ready["metric"]["job"], ready["metric"]["instance"]) == ("seedrl", watched.metrics)


def test_every_query_of_the_console_has_data(watched: Watched) -> None:
    rows, tiles = re.findall(r"^const (?:ROWS|TILES) = (\[.*?^\]);", watched.page("/consoles/seedrl.html"), re.M | re.S)
    queries = [query for row in json.loads(rows) for panel in row["panels"] for query, _ in panel["queries"]]
    queries += [tile["query"] for tile in json.loads(tiles)]
    watched.all_have_data([filled(query, watched) for query in queries])


def test_numbers_of_the_console_are_there_without_a_script(watched: Watched) -> None:
    shown = re.findall(r"<h2>([^<]+)</h2><b>([^<]*)</b>", watched.page("/consoles/seedrl.html"))
    assert [title for title, _ in shown] == [tile.title for tile in TILES]
    assert all(re.fullmatch(r"-?[\d.]+\w?%?|[a-z]+", value) for _, value in shown), shown


def test_console_of_an_unknown_job_says_so(watched: Watched) -> None:
    page = watched.page("/consoles/seedrl.html", job='<b>"none"')
    assert "Prometheus knows no target of the job &lt;b&gt;" in page
    assert '<b>"none"' not in page


class Curves(HTMLParser):
    """How many points the longest curve of each panel has."""

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[str, int] = {}
        self._panel = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "section":
            self._panel = str(found["data-title"])
            self.points[self._panel] = 0
        elif tag == "path" and found.get("class") == "curve" and self._panel:
            points = len(re.findall(r"[ML]-?[\d.]+ -?[\d.]+", str(found["d"])))
            self.points[self._panel] = max(points, self.points[self._panel])


def test_console_in_a_browser_draws_a_curve_in_every_panel(watched: Watched) -> None:
    chromium()
    eventually(
        lambda: watched.ask("count_over_time((seedrl_updates_total > 10)[1m:1s]) > 8")
    )  # a point each two seconds
    document = dom_of(f"http://{watched.prometheus}/consoles/seedrl.html#5m", 4000)
    curves = Curves()
    curves.feed(document)
    assert list(curves.points) == [panel.title for panel in PANELS]
    assert {title: points for title, points in curves.points.items() if points < 2} == {}
    assert "CartPole-v1" in document
    assert 'id="down" hidden' in document


def test_no_alert_fires_while_all_is_well(watched: Watched) -> None:
    assert watched.ask('ALERTS{alertstate="firing"}') == []


# Nothing is well


def test_checkpoints_that_cannot_be_written_raise_an_alert(watched: Watched) -> None:
    checkpoints = watched.run_dir / "checkpoints"
    aside = checkpoints.rename(watched.run_dir / "aside")
    checkpoints.touch()  # not even root can write into a file as if it were a folder
    eventually(lambda: watched.fires("CheckpointFailed"))
    checkpoints.unlink()
    aside.rename(checkpoints)


def test_stopped_actor_raises_alerts_of_silence_and_absence(watched: Watched) -> None:
    os.kill(watched.actor(), signal.SIGSTOP)
    eventually(lambda: watched.fires("ActorSilent"))
    eventually(lambda: watched.fires("NoActors"))


def test_actor_that_joins_and_sends_nothing_raises_an_alert_of_a_stall(watched: Watched) -> None:
    with RawActor(watched.listen) as actor:
        actor.join(make_spec(shape=(4,), num_actions=2))
        eventually(lambda: watched.fires("LearnerStalled"))


def test_killed_learner_raises_an_alert_that_the_console_shows(watched: Watched) -> None:
    watched.kill_learner()
    eventually(lambda: watched.fires("LearnerDown"))
    page = watched.page("/consoles/seedrl.html")
    assert '<p class="words" id="down">' in page
    assert "<b>LearnerDown</b> is firing" in page


@pytest.mark.chaos
def test_restarted_run_shows_no_burst_of_steps(watched: Watched) -> None:
    """It counts on from its checkpoint: far from zero, and Prometheus must not take that for steps of a moment."""
    eventually(lambda: saved_steps(watched.run_dir) and watched.ask("seedrl_env_steps_total > 10000"))
    if watched.run.is_running:
        watched.kill_learner()
    assert watched.run.wait() != 0
    saved, started = saved_steps(watched.run_dir), watched.last("process_start_time_seconds")
    watched.run = watched.start_run()
    newer = f"seedrl_env_steps_total and on (instance) process_start_time_seconds > {started + 1}"
    [first] = eventually(lambda: watched.ask(f"min_over_time(({newer})[1m:1s])"))
    assert float(first["value"][1]) >= saved
    eventually(lambda: watched.has_data("rate(seedrl_env_steps_total[1m])"))
    steps = dashboards.scoped("rate(seedrl_env_steps_total[$window])", "$scope")
    assert watched.ask(filled(steps.replace("$window", "1m"), watched)) == []
    eventually(lambda: watched.has_data(filled(steps, watched)))
    watched.run.signal(signal.SIGTERM)
    assert watched.run.wait() == 0


def test_observe_ends_with_a_signal_and_leaves_nothing_behind(watched: Watched) -> None:
    watched.observe.children()
    watched.observe.signal(signal.SIGTERM)
    assert watched.observe.wait() == 0
    assert watched.observe.left_behind() == []


def test_hurried_rules_keep_their_conditions() -> None:
    text = (FILES / "rules.yml").read_text()
    assert len(re.findall("alert:", hurried(text))) == len(re.findall("alert:", text))
    assert "[10m]" not in hurried(text)
    assert "for: 1m" not in hurried(text)
