"""The live page in a real browser, served by a real endpoint: what people see, whatever the learner tells it."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from seedrl.monitoring.endpoint import Endpoint, Page
from seedrl.monitoring.pages import live_page
from tests.browser import chromium, dom_of, screenshot

ROWS = 120
VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
HOSTILE = "<script>document.title='owned'</script>"
WATCHING = """addEventListener("unhandledrejection", ({reason}) => { document.body.dataset.error = reason; });"""
POINTING = """setTimeout(() => {
    const canvas = document.querySelector("#plot-return .canvas"), box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 44 + (box.width - 58) / 2}));
}, 3500);"""


# What the learner would say


def history(rows: int = ROWS) -> list[dict[str, Any]]:
    return [row_at(at / rows) for at in range(1, rows + 1)]


def row_at(part: float) -> dict[str, Any]:
    """A row after this part of a run of an hour."""
    shares = {"cycle/env": 0.5, "cycle/network": 0.1, "cycle/hold": 0.05, "cycle/fill": 0.15, "cycle/inference": 0.2}
    serving = {"serving/read": 0.2, "serving/forward": 0.3, "serving/hold": 0.1, "serving/idle": 0.4}
    learner = {"learner/wait": 0.25, "learner/forward": 0.25, "learner/backward": 0.5}
    reported = {"grad_norm": 1.5 - part, "algorithm/td_error": 1.8 - part, "algorithm/surprise": math.sin(9 * part)}
    return {
        **{
            "seconds": 3600 * part,
            "env_steps": int(2e6 * part),
            "frames": int(8e6 * part),
            "updates": int(4321 * part),
        },
        **{"episodes": int(900 * part), "return_mean_100": 40 * part - 21, "steps_per_second": 567.8 + 10 * part},
        **{
            "updates_per_second": 1.25,
            "policy_lag": 2 + part,
            "learner_wait_fraction": 0.25,
            "store_fill": 0.4,
            "reuse": 2.0,
        },
        **{"backpressure_fraction": 0.03, "inference_batch": 20.0, **shares, **serving, **learner, **reported},
    }


def actor(number: int, **different: Any) -> dict[str, Any]:
    return {
        **{"name": f"box-{number}", "session": f"{number:08x}", "peer": "ipv4:10.0.0.1:4000", "transport": "message"},
        **{"envs": 32, "steps": 1000, "steps_per_second": 100.0 + number, "round_trip_seconds": 0.0123},
        **{"wait_fraction": 0.4, "policy_lag": 2.0, "reconnects": 0, "connected_seconds": 60, "silent_seconds": 0.1},
        **different,
    }


def status(**different: Any) -> dict[str, Any]:
    verdict = {
        "bottleneck": "env",
        "evidence": "A request spends 50% of its cycle in the environments.",
        "change": "Start another actor: actors.count=2.",
    }
    return {
        **{"state": "running", "version": "0.1.0", "env": "Pong-v5", "run_dir": "runs/Pong-v5/1", "device": "cpu"},
        **{"goal_env_steps": 5_000_000, "goal_return": 18.0, "row": row_at(1), "verdict": verdict, "trouble": {}},
        "actors": [actor(1), actor(2)],
        **different,
    }


# What people see


class Node:
    """An element of a document."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Node | str] = []

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list["Node"]:
        return [n for n in self.walk() if n.tag == tag and attributes.items() <= n.attributes.items()]

    def id(self, name: str) -> "Node":
        [found] = [node for node in self.walk() if node.attributes.get("id") == name]
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def is_hidden(self) -> bool:
        return "hidden" in self.attributes


class Document(HTMLParser):
    """The elements of what a browser wrote down."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self._open = [Node("document", {})]
        self.feed(html)
        self.root = self._open[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


@contextlib.contextmanager
def served(status: Callable[[], Any], rows: list[Any] | None = None, script: str = WATCHING) -> Iterator[str]:
    """Serve the page, with a script of the test, beside what it asks for. Every request is answered anew."""
    chromium()
    page = live_page()
    pages = {
        "/": lambda: page._replace(content=page.content + f"<script>{script}</script>".encode()),
        "/status.json": lambda: as_json(status()),
        "/history.json": lambda: as_json({"rows": history() if rows is None else rows}),
    }
    endpoint = Endpoint("127.0.0.1:0", pages, clock=itertools.count().__next__)
    try:
        yield f"http://{endpoint.start()}/"
    finally:
        endpoint.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(status, rows, script) returns the address of a page."""
    with contextlib.ExitStack() as until_the_end:
        yield lambda *arguments, **options: until_the_end.enter_context(served(*arguments, **options))


def as_json(value: Any) -> Page:
    return Page(json.dumps(value).encode(), "application/json")


def look(url: str, milliseconds: int = 1500) -> Node:
    document = Document(dom_of(url, milliseconds)).root
    assert document.all("body")[0].attributes.get("data-error") is None
    return document


def curve(document: Node, key: str) -> list[tuple[float, float]]:
    """The points of what is drawn for a key."""
    [path] = [node for node in document.all("path") if node.attributes.get("data-key") == key]
    numbers = [tuple(map(float, pair.split())) for pair in re.findall(r"[-\d.]+ [-\d.]+", path.attributes["d"])]
    return [(x, y) for x, y in numbers]


@pytest.fixture(scope="module")
def seen() -> Node:
    """A run with nothing wrong but one actor. Looked at once: a browser takes its time to start."""
    actors = [actor(number) for number in range(24)] + [actor(99, silent_seconds=12.0, reconnects=2)]
    with served(lambda: status(actors=actors)) as url:
        return look(url)


def test_page_shows_a_run_at_one_look(seen: Node) -> None:
    assert seen.id("env").text == "Pong-v5"
    assert seen.id("state").text == "running"
    assert "up 1 h" in seen.id("about").text
    assert "runs/Pong-v5/1" in seen.id("about").text
    assert seen.id("verdict").text == (
        "The environments set the pace.A request spends 50% of its cycle in the environments."
        "Start another actor: actors.count=2."
    )
    assert [code.text for code in seen.id("verdict").all("code")] == ["actors.count=2"]
    assert seen.id("lost").is_hidden
    assert seen.id("trouble").is_hidden
    tiles = {name: seen.id(f"tile-{name}").text for name in ("return", "rate", "steps", "updates", "lag", "wait")}
    tiles = {name: re.sub(r"\s+", " ", text).strip() for name, text in tiles.items()}
    assert tiles == {
        "return": "Return19 → 18▲ +4 in 6 min",
        "rate": "Steps per second5782.31k frames/s",
        "steps": "Steps2M / 5M40%, 1 h 26 min left",
        "updates": "Updates per second1.254.32k so far, reuse 2",
        "lag": "Policy lag3store 40% full",
        "wait": "Learner waits25%actors held back 3%",
    }


def test_page_draws_every_curve(seen: Node) -> None:
    learned = curve(seen, "return_mean_100")
    assert len(learned) == ROWS
    assert learned == sorted(learned, key=lambda point: (point[0], -point[1])), "to the right and upwards"
    for key in ("steps_per_second", "policy_lag", "grad_norm", "algorithm/td_error", "algorithm/surprise"):
        assert len(curve(seen, key)) == ROWS, key
    for key in ("env", "network", "hold", "fill", "inference"):
        assert len(curve(seen, f"cycle/{key}")) == 2 * ROWS, key
    assert "environments 50%" in seen.id("plot-cycle").text
    assert seen.id("plot-return").all("b")[0].text == "19"
    assert "goal 18" in seen.id("plot-return").text
    assert seen.id("thread-serving").text == "Server 50% busyread 20%forward 30%hold 10%idle 40%"
    assert seen.id("thread-learner").text == "Learner 75% busyforward 25%backward 50%wait 25%"


def test_page_lists_actors_slowest_first_and_marks_the_silent(seen: Node) -> None:
    rows = seen.id("actors").all("tbody")[0].all("tr")
    names = [node.text for row in rows for node in row.all("span", **{"class": "name"})]
    assert names == ["box-99", *(f"box-{number}" for number in range(19))]
    assert rows[0].attributes["class"] == "silent"
    assert "silent for 12 s" in rows[0].text
    assert "reconnected 2 times" in rows[0].text
    assert [cell.text for cell in rows[1].all("td")] == ["box-0", "100", "12.3 ms", "2", "40%", "32", "message", "now"]
    assert rows[-1].text == "… and 5 more"
    assert "25 actors, 1 silent" in seen.id("about").text


def test_page_shows_hostile_names_as_text(serve: Callable[..., str]) -> None:
    told = status(
        actors=[actor(1, name=HOSTILE, peer=HOSTILE, transport=HOSTILE)],
        trouble={HOSTILE: 3},
        verdict={"bottleneck": HOSTILE, "evidence": HOSTILE, "change": HOSTILE},
        **{"env": HOSTILE, "run_dir": HOSTILE, "state": HOSTILE, "device": HOSTILE, "version": HOSTILE},
    )
    rows = [{**row, f"algorithm/{HOSTILE}": 1.0} for row in history()]
    seen = look(serve(lambda: told, rows))
    for name in ("env", "state", "about", "verdict", "trouble", "actors", "reported"):
        assert HOSTILE in seen.id(name).text, name
    assert len(seen.all("script")) == 2, "the page's and this test's"
    assert "owned" not in seen.all("title")[0].text.replace(HOSTILE, "")


def test_page_shows_the_verdict_on_learning_beside_the_bottleneck(serve: Callable[..., str]) -> None:
    learning = {"verdict": "entropy gone", "evidence": "The return is flat.", "mood": "bad"}
    told = status(learning={**learning, "change": "Raise algorithm.entropy_cost (now 0.01)."})
    card = look(serve(lambda: told)).id("learning")
    assert card.text.startswith("It does not learn: entropy gone.The return is flat.Raise algorithm.entropy_cost")
    assert [code.text for code in card.all("code")] == ["algorithm.entropy_cost"]
    assert "--bad" in card.attributes["style"]


def test_page_of_a_paused_run_says_so_in_place_of_a_bottleneck(serve: Callable[..., str]) -> None:
    verdict = {"bottleneck": "paused", "evidence": "All actors are paused.", "change": "Let them continue."}
    seen = look(serve(lambda: status(state="paused", verdict=verdict)))
    assert seen.id("state").text == "paused"
    assert seen.id("verdict").text.startswith("Actors are paused.")


def test_page_return_curves_have_a_legend_and_their_true_spread(serve: Callable[..., str]) -> None:
    rows = [
        {
            **row,
            "eval_return_mean_100": 1.0,
            "eval_episodes": 7,
            "return_p10": -20.0,
            "return_p90": 20.0,
            "episodes": 40,
        }
        for row in history()
    ]
    seen = look(serve(lambda: status(row=rows[-1]), rows))
    legend = next(node for node in seen.id("plot-return").all("div") if node.attributes.get("class") == "legend")
    assert [span.text for span in legend.all("span")] == [
        "training, mean of 40 episodes",
        "evaluation, mean of 7 episodes",
        "10 % to 90 % of them",
    ]
    assert len(curve(seen, "return_p90")) == 2 * ROWS


def test_page_before_the_first_episode_ends_shows_the_reward(serve: Callable[..., str]) -> None:
    rows = [{**row, "return_mean_100": None, "reward_per_step": 0.25} for row in history()]
    seen = look(serve(lambda: status(row=rows[-1]), rows))
    assert seen.id("plot-return").is_hidden
    assert "reward 0.25 per step" in seen.id("tile-return").text
    assert len(curve(seen, "reward_per_step")) == ROWS


def test_page_of_an_on_policy_run_does_not_speak_of_an_empty_store(serve: Callable[..., str]) -> None:
    seen = look(serve(lambda: status(row={**row_at(1), "on_policy": 1.0, "store_fill": 0.0})))
    assert "store" not in seen.id("tile-lag").text
    assert "on policy" in seen.id("tile-lag").text


def test_page_goes_on_with_what_the_status_says(serve: Callable[..., str]) -> None:
    trouble = {"rows dropped: session_ended": 1234, "updates skipped": 0}
    told = (
        status(row=row_at(1 + number / 100), trouble={**trouble, "checkpoints failed": number})
        for number in itertools.count(1)
    )
    seen = look(serve(lambda: next(told)), milliseconds=3500)
    assert len(curve(seen, "policy_lag")) >= ROWS + 3
    box = seen.id("trouble")
    assert not box.is_hidden
    assert "rows dropped: session_ended 1\u202f234" in box.text
    assert re.search(r"checkpoints failed \d \+\d in the last minute", box.text)
    assert "updates skipped" not in box.text


def test_page_of_a_waiting_learner_says_how_to_start_an_actor(serve: Callable[..., str]) -> None:
    told = status(state="waiting", row=None, actors=[], address="10.0.0.1:50051")
    seen = look(serve(lambda: told, rows=[]))
    assert "seedrl actor learner=10.0.0.1:50051" in seen.id("verdict").text
    assert seen.id("actors").is_hidden
    assert seen.id("plots").is_hidden
    assert seen.id("lost").is_hidden


def test_page_draws_what_there_is(serve: Callable[..., str]) -> None:
    nothing: list[dict[str, Any]] = [
        {},
        {"row": {}, "verdict": None, "trouble": None, "actors": None},
        {"row": {"seconds": 5.0}, "actors": [{}], "verdict": {}},
    ]
    told = itertools.chain(nothing, itertools.repeat({**nothing[-1], "env": "after all of these"}))
    seen = look(serve(lambda: next(told), rows=[{}, None, {"seconds": 1, "env_steps": None}]), milliseconds=4500)
    assert seen.id("lost").is_hidden
    assert seen.id("env").text == "after all of these"
    assert seen.id("tile-return").all("div", **{"class": "value"})[0].text == "–"
    assert "NaN" not in seen.id("plots").text
    assert "undefined" not in "".join(node.text for node in seen.all("main") + seen.all("header"))


def test_page_leaves_gaps_where_values_are_missing(serve: Callable[..., str]) -> None:
    rows = [{**row, "return_mean_100": None, "policy_lag": None if at % 3 else 1.0} for at, row in enumerate(history())]
    told = status(row={**row_at(1), "return_mean_100": None})
    seen = look(serve(lambda: told, rows))
    assert "no episode has ended yet" in seen.id("tile-return").text
    assert "nothing yet" in seen.id("plot-return").text
    assert len(curve(seen, "policy_lag")) == ROWS // 3
    assert len(curve(seen, "steps_per_second")) == ROWS
    paths = [node.attributes.get("d", "") for node in seen.all("path")]
    assert not any("NaN" in path or "Infinity" in path for path in paths)


def failing(at: Callable[[int], bool]) -> Callable[[], dict[str, Any]]:
    """A status that cannot be had on some requests, numbered from 1."""
    numbers = itertools.count(1)

    def told() -> dict[str, Any]:
        if at(next(numbers)):
            raise OSError("gone")
        return status()

    return told


def test_page_says_that_the_connection_is_lost(serve: Callable[..., str]) -> None:
    seen = look(serve(failing(lambda number: number > 1)), milliseconds=3500)
    assert not seen.id("lost").is_hidden
    assert re.match(r"Connection lost since \d\d:\d\d:\d\d\.", seen.id("lost").text)
    assert seen.all("body")[0].attributes["class"] == "lost"
    assert "2.31k frames/s" in seen.id("tile-rate").text, "what was known stays"


def test_page_recovers_and_reads_out_what_is_pointed_at(serve: Callable[..., str]) -> None:
    told = failing(lambda number: number in (1, 2))
    seen = look(serve(told, script=WATCHING + POINTING), milliseconds=5000)
    assert seen.id("lost").is_hidden
    assert seen.id("env").text == "Pong-v5"
    assert re.match(r"Return over steps−[\d.]+ at 1(\.0\d)?M steps", seen.id("plot-return").text)
    assert re.search(r"at (29|30|31) min", seen.id("plot-lag").text), "the same moment in all of them"
    assert len(seen.all("line", **{"class": "cross"})) >= 4


def test_page_can_be_pictured(serve: Callable[..., str], tmp_path: Path) -> None:
    screenshot(serve(status), tmp_path / "page.png", 480, 900)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_page_loads_nothing_from_elsewhere() -> None:
    text = live_page().content.decode()
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text


def test_browser_that_is_missing_skips_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        chromium()
