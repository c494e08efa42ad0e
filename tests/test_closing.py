"""The last lines of a run: what it was, and commands that can be pasted."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from seedrl.config import EnvConfig, LearnerConfig, RunConfig, StopConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run.closing import closing_words, failed_words, next_lines
from seedrl.run.directory import RunDirectory
from seedrl.run.stopping import Stop
from seedrl.run.summary import summarize
from seedrl.run.totals import RunClock, counts_of
from seedrl.status import Learning


def left_by(command: str, run_dir: Path, **settings: Any) -> tuple[RunDirectory, LearnerConfig]:
    """Return a run directory as `seedrl run` or `seedrl learner` leaves it."""
    config = RunConfig(run_dir=str(run_dir), stop=StopConfig(env_steps=1000, return_mean_100=475), **settings)
    run = RunDirectory.prepare(config)
    if command == "run":
        run.write_job(config)
    return run, config


def commands_in(lines: list[str]) -> dict[str, list[str]]:
    """Return the commands by the word before them, as a shell reads them."""
    return {words[0]: words[1:] for words in (shlex.split(line.replace("train on", "train_on")) for line in lines)}


@pytest.mark.parametrize("command", ["run", "learner"])
def test_next_after_an_interruption_is_to_resume(tmp_path: Path, command: str) -> None:
    run, config = left_by(command, tmp_path / "it's a run")
    found = commands_in(next_lines(run, config, {"status": "interrupted", "env_steps": 10}))
    assert found == {"resume": ["seedrl", command, str(run.path)]}


def test_next_after_the_steps_are_used_up_is_to_train_for_more(tmp_path: Path) -> None:
    run, config = left_by("run", tmp_path / "run")
    found = commands_in(next_lines(run, config, {"status": "done", "env_steps": 1024}))
    assert found["train_on"] == ["seedrl", "run", str(run.path), "stop.env_steps=2048"]
    assert found["evaluate"] == ["seedrl", "eval", str(run.path)]


def test_next_after_the_return_is_reached_is_to_use_the_policy(tmp_path: Path) -> None:
    run, config = left_by("run", tmp_path / "run")
    found = commands_in(next_lines(run, config, {"status": "done", "env_steps": 500}))
    assert next(iter(found)) == "evaluate"
    assert found["export"] == ["seedrl", "export", str(run.path)]
    assert found["train_on"] == ["seedrl", "run", str(run.path), "stop.return_mean_100=null"]


def test_next_where_actors_bring_the_environment_is_to_serve(tmp_path: Path) -> None:
    """`seedrl eval` has no such environment."""
    run, config = left_by("learner", tmp_path / "run", env=EnvConfig(id="own/arm"))
    found = commands_in(next_lines(run, config, {"status": "done", "env_steps": 500}))
    assert "evaluate" not in found
    assert found["serve"] == ["seedrl", "serve", str(run.path)]
    assert found["train_on"][:2] == ["seedrl", "learner"]


def test_next_after_a_failure_is_to_look_and_to_resume(tmp_path: Path) -> None:
    run, config = left_by("run", tmp_path / "run")
    look, resume = failed_words(run, config).splitlines()
    assert str(run.logs) in look
    assert shlex.split(resume) == ["resume", "seedrl", "run", str(run.path)]


def test_closing_words_name_the_directory_the_reason_and_what_is_next(tmp_path: Path) -> None:
    run, config = left_by("run", tmp_path / "run")
    stop = Stop()
    stop.ask("interrupted", "Interrupted by SIGINT")
    serving, learning = ServingMetrics(), LearningMetrics()
    nothing = summarize(config, stop, counts_of(serving, learning), seconds=0.0, verdict=Learning())
    first, *rest = closing_words(run, config, nothing).splitlines()
    assert first == "Interrupted by SIGINT, before anything was trained."
    assert rest == [f"  resume     seedrl run {run.path}"]
    learning.updates = 3
    summary = summarize(config, stop, counts_of(serving, learning), seconds=3.0, verdict=Learning())
    lines = closing_words(run, config, summary).splitlines()
    assert lines[0] == "Interrupted by SIGINT."
    assert f"  saved in   {run.path}" in lines
    assert lines[-1] == f"  resume     seedrl run {run.path}"


def test_summary_of_a_run_that_never_began_has_no_speed() -> None:
    summary = summarize(
        LearnerConfig(), Stop(), counts_of(ServingMetrics(), LearningMetrics()), seconds=0.0, verdict=Learning()
    )
    assert summary["steps_per_second"] == 0


def test_clock_of_a_run_that_is_done_already_stands_still() -> None:
    """So a run that is resumed and has nothing to do keeps its steps per second."""
    clock = RunClock()
    clock.seconds_before = 12.5
    assert clock.seconds == clock.seconds == 12.5
    clock.start()
    assert clock.seconds > 12.5


SUMMARY = {
    **{
        "status": "done",
        "reason": "Done",
        "episodes": 7,
        "return_mean_100": 1.5,
        "eval_return_mean_100": None,
        "seconds": 60.0,
    },
    **{"env_steps": 10, "steps_per_second": 1.0, "updates": 2, "policy_lag_mean": 0.0, "learner_wait_fraction": 0.5},
    **{"inference_batch_mean": 4.0, "seconds_by_stage": {}},
    "learning": {"verdict": "flat", "evidence": "The return is flat.", "change": "Raise it.", "mood": "bad"},
}


def test_closing_words_have_the_verdict_on_learning_and_what_to_try(tmp_path: Path) -> None:
    words = closing_words(*left_by("run", tmp_path / "run"), SUMMARY)
    assert "  learning   flat: The return is flat.\n             → Raise it.\n" in words


@pytest.mark.parametrize(
    ("episodes", "words"), [(1, "of 1 episode)"), (7, "the last 7 episodes)"), (900, "the last 100 episodes)")]
)
def test_closing_words_name_as_many_episodes_as_there_were(tmp_path: Path, episodes: int, words: str) -> None:
    assert words in closing_words(*left_by("run", tmp_path / "run"), {**SUMMARY, "episodes": episodes})
