"""Dashboards, console and alerts: that the files are fresh, their queries valid, and their words true."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from seedrl.commandline.settings import settings_of
from seedrl.commands import COMMANDS
from seedrl.metrics import GROUPS, LEARNER_STAGES, SERVING_STAGES, Kind, declared
from seedrl.monitoring import dashboards
from seedrl.monitoring.dashboards import scoped
from seedrl.monitoring.panels import PANELS, ROWS, TILES, Unit
from tests.programs import needed

ROOT = Path(__file__).parents[1]
FILES = ROOT / "conf/observability"
SUFFIXES = {
    Kind.counter: ("_total",),
    Kind.gauge: ("",),
    Kind.info: ("",),
    Kind.histogram: ("_bucket", "_sum", "_count"),
}
OTHERS = {"up", "ALERTS"}
OF_THE_PROCESS = {"start_time_seconds", "cpu_seconds_total", "resident_memory_bytes"}


def known_metrics() -> set[str]:
    """Every name that can be asked for, but for recorded ones."""
    ours = {
        f"seedrl_{name}{suffix}"
        for group in GROUPS
        for name, declaration in declared(group)
        for suffix in SUFFIXES[declaration.kind]
    }
    return ours | OTHERS | {f"process_{name}" for name in OF_THE_PROCESS}


def names_in(query: str) -> set[str]:
    """The metrics a query asks for; fails if it is not PromQL."""
    names: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(query), visit)
    assert names, query
    return names


def grafana() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((FILES / dashboards.GRAFANA).read_text())
    return dashboard


def grafana_queries() -> Iterator[str]:
    for panel in grafana()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (each["expr"] for each in grafana()["annotations"]["list"])


def with_values(query: str) -> str:
    """Return the query as Grafana sends it."""
    return query.replace("$__rate_interval", "8s").replace("$job", "seedrl").replace("$instance", "127.0.0.1:9464")


def console_queries() -> Iterator[str]:
    """Yield the queries of the script and those that Prometheus fills in itself."""
    text = (FILES / dashboards.CONSOLE).read_text()
    for rows in re.findall(r"^const (?:ROWS|TILES) = (\[.*?^\]);", text, re.MULTILINE | re.DOTALL):
        for each in json.loads(rows):
            queries = (
                [each["query"]] if "query" in each else [query for p in each["panels"] for query, _ in p["queries"]]
            )
            yield from (query.replace("$scope", 'job="seedrl"').replace("$window", "20s") for query in queries)
    for query in re.findall(r'printf (?:`([^`]*)`|"((?:[^"\\]|\\.)*)") \$', text):
        filled = "".join(query).replace('\\"', '"')
        yield re.sub(r"%(\[\d\])?q", '"x"', filled)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


# The files


@pytest.mark.parametrize(
    ("name", "made"), [(dashboards.GRAFANA, dashboards.grafana), (dashboards.CONSOLE, dashboards.console)]
)
def test_committed_file_is_what_the_panels_give(name: str, made: Any) -> None:
    assert (FILES / name).read_text() == made(), "run `make dashboards`"


def test_program_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dashboards.write(tmp_path)
    assert capsys.readouterr().out.count("wrote") == 2
    for name in (dashboards.GRAFANA, dashboards.CONSOLE):
        assert (tmp_path / name).read_text() == (FILES / name).read_text()


# Queries


def test_panel_of_the_limiter_shows_the_share_of_time_that_each_side_waits() -> None:
    (panel,) = [each for each in PANELS if each.title == "Held back by the limiter"]
    assert (panel.unit, panel.max, panel.queries) == (Unit.share, 1.0, (("seedrl_store_limited", "{side}"),))
    declaration = next(each for group in GROUPS for name, each in declared(group) if name == "store_limited")
    assert declaration.values == ("filling", "learner", "actors")


def test_known_metrics_have_the_names_they_are_exported_by() -> None:
    assert {
        "seedrl_env_steps_total",
        "seedrl_policy_lag_bucket",
        "seedrl_sessions_open",
        "seedrl_run_info",
    } <= known_metrics()


def test_queries_of_grafana_are_valid_and_ask_for_what_exists() -> None:
    queries = [with_values(query) for query in grafana_queries()]
    assert len(queries) > len(PANELS)
    assert set().union(*map(names_in, queries)) <= known_metrics()


def test_queries_of_the_console_are_valid_and_ask_for_what_exists() -> None:
    queries = list(console_queries())
    assert len(queries) > len(PANELS) + 2 * len(TILES)
    assert set().union(*map(names_in, queries)) <= known_metrics()


def test_queries_of_grafana_and_console_are_the_same() -> None:
    scope = 'job="seedrl",instance="127.0.0.1:9464"'
    ours = {scoped(query, scope).replace("$window", "8s") for panel in PANELS for query, _ in panel.queries}
    assert ours <= {with_values(query) for query in grafana_queries()}


def test_queries_of_rules_are_valid_and_ask_for_what_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set().union(*(names_in(rule["expr"]) for rule in rules())) <= known_metrics() | recorded


def test_queries_of_grafana_take_rates_over_its_own_interval_only() -> None:
    ranges = [found for query in grafana_queries() for found in re.findall(r"\[([^]]*)\]", query)]
    assert set(ranges) == {"$__rate_interval"}


def test_query_is_limited_to_one_learner_wherever_it_names_a_metric() -> None:
    assert scoped('a_b{c="d"} / seedrl_x{y="z"} / process_p', "S") == 'a_b{c="d"} / seedrl_x{S,y="z"} / process_p{S}'


def test_query_of_a_rate_leaves_out_the_window_of_a_restart() -> None:
    query = scoped("rate(seedrl_x_total[$window])", "S")
    assert query.startswith("(rate(seedrl_x_total{S}[$window])) unless on (job, instance) (changes(process_start_time_")
    assert "unless" not in scoped("seedrl_x", "S")


# What people read


def test_panels_have_rows_titles_and_descriptions() -> None:
    titles = [panel.title for panel in PANELS]
    assert len(titles) == len(set(titles))
    assert {panel.row for panel in PANELS} == set(ROWS)
    assert [panel.title for panel in PANELS if not panel.description.endswith(".") or not panel.queries] == []
    assert [panel.title for panel in PANELS if panel.unit is Unit.word] == []  # a curve has no words


def test_panels_of_grafana_do_not_overlap_and_have_units_and_descriptions() -> None:
    taken: set[tuple[int, int]] = set()
    panels = grafana()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(TILES) + len(ROWS) + len(PANELS)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"


def test_grafana_dashboard_has_its_variables_and_marks_restarts() -> None:
    dashboard = grafana()
    assert dashboard["uid"] == "seedrl"
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    [restarts] = dashboard["annotations"]["list"]
    assert "changes(process_start_time_seconds" in restarts["expr"]


@pytest.mark.parametrize("name", ["datasources", "dashboards"])
def test_grafana_provisioning_is_yaml_of_the_version_grafana_reads(name: str) -> None:
    assert yaml.safe_load((FILES / f"grafana/provisioning/{name}/seedrl.yml").read_text())["apiVersion"] == 1


def test_console_needs_nothing_but_prometheus() -> None:
    text = (FILES / dashboards.CONSOLE).read_text()
    assert re.findall(r"""(?:src|href)=["'](?!\{\{ pathPrefix)[^"']*""", text) == []
    assert set(re.findall(r'template "(\w+)"', text)) <= set(re.findall(r'define "(\w+)"', text))
    assert "@" not in re.sub(r"@media", "", text)  # every placeholder is filled


def test_console_has_a_place_and_a_colour_for_every_stage() -> None:
    text = (FILES / dashboards.CONSOLE).read_text()
    [order] = re.findall(r"const STAGES = (\[.*?\]);", text, re.DOTALL)
    [same] = re.findall(r"const SAME = \{(.*?)\};", text)
    stages = {*SERVING_STAGES, *LEARNER_STAGES, "env", "network", "inference", "busy", "fill", "hold"}
    assert set(json.loads(order)) == stages
    colours = dict(re.findall(r'(\w+): "(\w+)"', same))
    for stage in stages:
        assert text.count(f"--{colours.get(stage, stage)}: #") == 2, stage  # light and dark


def described() -> list[tuple[str, str]]:
    """Everything that tells people what to do."""
    panels = [(panel.title, panel.description) for panel in (*PANELS, *TILES)]
    return panels + [(name, " ".join(alert["annotations"].values())) for name, alert in ALERTS.items()]


@pytest.mark.parametrize(("title", "words"), described())
def test_description_names_settings_and_panels_that_exist(title: str, words: str) -> None:
    settings = {setting.key for name in ("run", "learner", "actor") for setting in settings_of(COMMANDS[name].schema)}
    groups = {key.partition(".")[0] for key in settings if "." in key}
    named = {key for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", words) if key.partition(".")[0] in groups}
    assert named <= settings
    assert set(re.findall(r'"([A-Z][^"]+)"', words)) <= {panel.title for panel in PANELS}


# Alerts


def test_alerts_have_a_severity_and_say_what_to_do() -> None:
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("warning", "critical"), name
        assert {"summary", "description"} == set(alert["annotations"]), name
        assert "$labels.instance" in alert["annotations"]["summary"], name
        assert len(alert["annotations"]["description"]) > 100, name


def test_alerts_are_each_tested_to_fire() -> None:
    text = (FILES / "rules_test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', text)) == set(ALERTS)


def test_alerts_are_all_in_the_documentation() -> None:
    text = (ROOT / "docs/observability.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)` \|", text, re.MULTILINE)) == set(ALERTS)


@pytest.mark.parametrize("check", ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"])
def test_promtool_is_content(check: str) -> None:
    command = [needed("promtool"), *check.split()]
    done = subprocess.run(command, cwd=FILES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
