"""What people see of a running learner: its pages, `seedrl status`, `seedrl doctor`, and what a run leaves behind."""

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import envs_server.session
from seedrl.config import SecurityConfig, StatusConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.connection import learner_status
from seedrl.wire.channel import Link, ask_status
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands, Process
from tests.integration.support import RunningLearner
from tests.integration.waiting import DEADLINE, eventually, free_address


def get(address: str, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{page}", timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(text: str, name: str) -> float:
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))


@pytest.fixture
def running(start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch) -> RunningLearner:
    """A learner that trains with two actors, which report often."""
    monkeypatch.setattr(envs_server.session, "REPORT_SECONDS", 0.1)
    learner = start_learner(metrics="127.0.0.1:0")  # a port that nobody takes over when it ends
    for name in ("left", "right"):
        start_actor(learner.address, name=name)
    eventually(lambda: learner.service.monitor.status().row.get("updates", 0) > 1)
    eventually(lambda: all(actor.steps_per_second > 0 for actor in learner.service.monitor.status().actors))
    return learner


# Pages


def test_pages_of_a_running_learner_show_that_it_runs(running: RunningLearner) -> None:
    address = running.service.monitor.address
    text = get(address, "/metrics")[1]
    assert metric(text, "seedrl_env_steps_total") > 0
    assert metric(text, "seedrl_sessions_open") == 2
    assert metric(text, "seedrl_desired_actors") == 1
    assert metric(text, "seedrl_slots_taken") == 8
    assert metric(text, "seedrl_ready") == 1
    assert get(address, "/healthz") == (200, "alive\n")
    assert get(address, "/readyz") == (200, "running\n")
    assert json.loads(get(address, "/status.json")[1])["state"] == "running"
    newest = json.loads(get(address, "/history.json")[1])["rows"][-1]
    assert newest["env_steps"] > 0
    assert newest["desired_actors"] == 1
    assert "<html" in get(address, "/")[1]


def test_pages_of_a_learner_without_actors_say_that_it_waits(start_learner: StartLearner) -> None:
    learner = start_learner()
    address = eventually(lambda: learner.service.monitor.address)
    assert get(address, "/readyz") == (503, "waiting\n")
    assert get(address, "/healthz")[0] == 200
    assert metric(get(address, "/metrics")[1], "seedrl_ready") == 0
    assert json.loads(get(address, "/status.json")[1])["row"] == {}


def test_pages_of_a_learner_that_is_stuck_say_so(running: RunningLearner) -> None:
    class Stuck:
        alive_at = time.monotonic() - 1000

    life = running.service.monitor._life
    assert life.running is not None
    life.running = life.running._replace(batches=Stuck())
    status, words = get(running.service.monitor.address, "/healthz")
    assert status == 503
    assert "1000 s" in words


def test_pages_end_with_the_learner(running: RunningLearner) -> None:
    address = running.service.monitor.address
    running.stop()
    with pytest.raises(urllib.error.URLError):
        get(address, "/metrics")


def test_metrics_empty_serves_no_pages(start_learner: StartLearner) -> None:
    learner = start_learner(metrics="")
    assert learner.service.monitor.address == ""


def test_metrics_address_that_is_taken_ends_the_learner_with_a_reason(start_learner: StartLearner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        learner = start_learner(metrics=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"metrics=127\.0\.0\.1"):
            learner.join()


# Status


def test_status_over_the_wire_tells_learner_actors_and_verdict(running: RunningLearner) -> None:
    ask = StatusConfig(learner=running.address)
    eventually(lambda: all(actor.round_trip_seconds for actor in learner_status(ask).actors))  # the second report
    status = learner_status(ask)
    assert (status.state, status.env, status.device) == ("running", "Signed-v0", "cpu")
    assert status.row["env_steps"] > 0
    assert status.verdict.bottleneck in ("env", "network", "batching", "inference", "store", "learner")
    assert status.learning.evidence
    assert {actor.name for actor in status.actors} == {"left", "right"}
    for actor in status.actors:
        assert (actor.envs, actor.transport, actor.reconnects) == (4, "message", 0)
        assert 0 < actor.round_trip_seconds < DEADLINE
        assert 0 <= actor.wait_fraction <= 1
        assert actor.silent_seconds < DEADLINE
        assert actor.peer.startswith("ipv4:127.0.0.1")


def test_status_of_a_waiting_learner_is_told_before_any_actor_came(start_learner: StartLearner) -> None:
    status = ask_status(Link(start_learner().address, SecurityConfig()), DEADLINE)
    assert (status.state, status.row, status.actors) == ("waiting", {}, [])


# The commands, as processes


@pytest.mark.long
def test_status_of_a_run_that_has_ended_says_how(commands: Commands) -> None:
    code, _, err = commands.run("run", "run_dir=short", "stop.env_steps=2000", "display=none")
    assert code == 0, err
    code, out, err = commands.run("status", "short")
    assert (code, err) == (0, "")
    assert out.startswith("short  DONE, ")
    assert "\n│  CartPole-v1, seed 1: return " in out
    assert "  train on   seedrl run short stop.env_steps=" in out
    code, _, err = commands.run("control", "pause")  # of the newest run, which lies outside of runs/
    assert code == 4
    assert err.startswith("seedrl control: short has ended, done: Done: ")
    assert (commands.directory / "short/curve.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((commands.directory / "short/summary.json").read_text())
    assert summary["seconds_by_stage"]["learner"]["backward"] > 0
    assert summary["learning"]["evidence"]
    rows = [json.loads(line) for line in (commands.directory / "short/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["env_steps"] == summary["env_steps"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "there is no run below runs/, nor was one started from here; name one"),
        (["nowhere"], 2, "there is no directory nowhere"),
        (["run=nowhere"], 2, "there is no directory nowhere"),
        (["learner=foo"], 2, "learner=foo must be HOST:PORT or unix:PATH, such as learner=foo:50051"),
        (["learner=127.0.0.1:1"], 4, "no learner answers at 127.0.0.1:1"),
    ],
)
def test_status_without_a_learner_says_what_to_give(
    arguments: list[str], code: int, words: str, commands: Commands
) -> None:
    ended, _, err = commands.run("status", *arguments)
    assert (ended, words in err) == (code, True), err


@pytest.mark.long
def test_doctor_before_a_run_that_works_says_so(commands: Commands) -> None:
    code, out, err = commands.run("doctor", "env=catch", f"listen={free_address()}")
    assert code == 0, out + err
    checks = ("packages", "settings", "generated code", "listen", "metrics", "device", "environment", "messages")
    for check in (*checks, "memory", "checkpoints", "disk"):
        assert any(line[2:].startswith(f"{check}: ") for line in out.splitlines()), check
    assert "ready" in out


@pytest.mark.long
def test_doctor_before_a_run_that_cannot_work_finds_every_reason(commands: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, out, err = commands.run(
            "doctor",
            "env.id=Pongg-v5",
            f"listen={address}",
            "store.capacity=1",
            "run_dir=/proc/run",
            "metrics=nonsense",
        )
    assert code == 2
    wrong = [line for line in out.splitlines() if line.startswith("✗")]
    assert any("store.capacity=1" in line for line in wrong)
    assert any(f"listen: {address} cannot be bound" in line for line in wrong)
    assert any("metrics=nonsense is no address" in line for line in wrong)
    assert any("did you mean Pong-v5" in line for line in wrong)
    assert any("/proc cannot be written to" in line for line in wrong)
    assert "checks failed" in err


@pytest.mark.long
def test_doctor_of_an_observation_too_large_for_memory_says_how_much_is_free(commands: Commands) -> None:
    code, out, _ = commands.run("doctor", "env=pong", "serving.max_slots=10000000")
    assert code == 2
    assert any(line.startswith("✗ memory: ") and "free" in line for line in out.splitlines())


# A run that goes on, shared by the tests that only look at it; last, because it goes on until the end of the file.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Commands, Process, Path]]:
    """`seedrl run` of CartPole that does not end, and its directory."""
    with contextlib.closing(Commands(tmp_path_factory.mktemp("run"))) as commands:
        directory = commands.directory / "runs/CartPole-v1/endless"
        settings = ["display=plain", "stop.env_steps=1000000000", "stop.return_mean_100=null"]
        process = commands.start("run", f"run_dir={directory}", *settings)
        eventually(lambda: not process.is_running or updates_of(commands, directory) > 5)
        yield commands, process, directory


def updates_of(commands: Commands, directory: Path) -> int:
    return int(status_of(commands, directory).get("row", {}).get("updates", 0))


def status_of(commands: Commands, directory: Path) -> dict[str, Any]:
    if not (directory / "context.json").exists():
        return {}
    code, out, _ = commands.run("status", f"run={directory}", "--json")
    return json.loads(out) if code == 0 else {}


@pytest.mark.long
def test_status_without_arguments_finds_the_newest_run(run: tuple[Commands, Process, Path]) -> None:
    commands, _, directory = run
    code, out, err = commands.run("status")
    assert code == 0, err
    assert out.startswith("learner  CartPole-v1 on cpu, running, seedrl 0.1.0;")
    assert str(directory) in out  # on the next line, if it is long
    assert "│  algorithm vtrace (1 pass × 1 minibatch)" in out
    assert "steps/s" in out
    assert "bottleneck" in out
    assert "actor-0" in out


@pytest.mark.long
def test_doctor_of_a_running_learner_names_the_bottleneck(run: tuple[Commands, Process, Path]) -> None:
    commands, _, directory = run
    code, out, err = commands.run("doctor", f"run={directory}")
    assert code == 0, err
    assert out.startswith("bottleneck: ")
    assert len(out.splitlines()) == 3


@pytest.mark.long
def test_actor_with_metrics_serves_its_own(run: tuple[Commands, Process, Path]) -> None:
    commands, _, directory = run
    address = json.loads((directory / "context.json").read_text())["address"]
    actor = commands.start("actor", f"learner={address}", "metrics=127.0.0.1:0", "name=watched")
    actor.says("metrics at http://")
    served = next(line for line in actor.out.splitlines() if "metrics at" in line).split("http://")[1].split("/")[0]
    eventually(lambda: metric(get(served, "/metrics")[1], "seedrl_actor_steps_total") > 0)
    assert get(served, "/readyz") == (200, "in a session\n")
    assert "watched" in {each["name"] for each in status_of(commands, directory)["actors"]}
    actor.end()
