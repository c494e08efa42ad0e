"""What people see of a run in a terminal: status, progress and closing words, also where it is narrow."""

import io
from typing import Any

import pytest
from rich.console import Console

from seedrl.config import Display, LearnerConfig
from seedrl.monitoring.overview import show
from seedrl.run.progress import ProgressDisplay
from seedrl.status import ActorStatus, Learning, Mood, Status, Verdict

ROW: dict[str, Any] = {
    **{"seconds": 75.0, "env_steps": 12_345, "episodes": 7, "updates": 30, "return_mean_100": 123.456},
    **{"steps_per_second": 2345.6, "updates_per_second": 0.5, "policy_lag": 1.5, "reuse": 1.0, "inference_batch": 32.0},
    **{"learner_wait_fraction": 0.25, "actor_wait_fraction": 0.5, "actors": 2, "dropped_rows": 0, "skipped_updates": 0},
    **{"eval_return_mean_100": None, "reward_per_step": 0.25, "desired_actors": 4, "bottleneck": "env"},
    "learning": "rising",
}
LEARNING = Learning("entropy gone", "The return is flat.", "Raise algorithm.entropy_cost (now 0.01).", Mood.bad)


def actor(number: int) -> ActorStatus:
    return ActorStatus(
        f"actor-{number}",
        number,
        "ipv4:192.168.100.200:54321",
        "message",
        32,
        10**6,
        1234.5,
        0.0123,
        0.4,
        2,
        0,
        60,
        0.1,
    )


def status(**different: Any) -> Status:
    numbers = {name: value for name, value in ROW.items() if isinstance(value, int | float)}
    known: dict[str, Any] = {
        **{
            "state": "running",
            "version": "0.1.0",
            "env": "Pong-v5",
            "device": "cpu",
            "run_dir": "runs/Pong-v5/20261117",
        },
        **{"address": "127.0.0.1:50051", "metrics_address": "127.0.0.1:9464", "goal_env_steps": 10**6, "row": numbers},
        "verdict": Verdict(
            "env", "The learner waits 50% of its time; stepping takes most.", "Raise actors.count (now 1)."
        ),
        "learning": LEARNING,
        "actors": [actor(1), actor(2)],
    }
    return Status(**{**known, **different})


def shown(width: int, **different: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show(status(**different), 20, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_status_fits_the_terminal_without_cutting_anything(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).replace("│", "").split())
    assert "…" not in text
    assert "learning entropy gone: The return is flat. → Raise algorithm.entropy_cost (now 0.01)." in text
    assert "bottleneck env: The learner waits 50% of its time; stepping takes most." in text
    assert text.count("actor-1 ") == text.count("actor-2 ") == 1
    assert ("192.168.100.200" in text) == (width >= 200), "the least important column goes first"
    assert "1,234" in text


def test_status_before_the_first_episode_tells_the_reward() -> None:
    row = {name: value for name, value in status().row.items() if name != "return_mean_100"}
    assert any("return – (no episode has ended; reward 0.25 per step)" in line for line in shown(200, row=row))


def test_status_without_a_verdict_on_learning_has_no_line_for_it() -> None:
    assert not any("learning" in line for line in shown(200, learning=Learning()))


@pytest.mark.parametrize("width", [30, 40, 46, 120])
def test_progress_table_shows_all_values_in_any_terminal(width: int) -> None:
    config = LearnerConfig(display=Display.live)
    config.stop.env_steps = 100_000_000
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = ProgressDisplay(config, console)
    console.print(display._table({**ROW, "env_steps": 12_345_678}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(text.replace("│", "").split())
    for value in ("12,345,678/", "100,000,000", "rising", "env", "50%"):
        assert value in joined, value


def test_progress_before_the_first_episode_tells_the_reward() -> None:
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(LearnerConfig(display=Display.plain), console)
    assert "return –  reward/step 0.25" in display._line({**ROW, "return_mean_100": None})
