"""The page about a run, and what is uploaded of it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from seedrl.config import CardConfig, Engine, EnvConfig, LaunchConfig, ModelConfig, RunConfig
from seedrl.errors import RunDirectoryError, SeedrlError
from seedrl.run.directory import RunDirectory, plain
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.trained.card import run_card, training_command, write_card
from seedrl.trained.hub import upload_run
from tests.test_contracts import composed
from tests.trained_runs import leave_trained

SUMMARY = {
    "status": "done",
    "env_steps": 1_234_567,
    "seconds": 600.0,
    "steps_per_second": 2057.6,
    "updates": 4321,
    "episodes": 987,
    "return_mean_100": 475.25,
    "trouble": {"rows dropped: partial_unroll": 7},
    "made_with": {"seedrl": "0.1.0", "commit": "abc123", "torch": "2.13.0"},
}
SCORE = {"episodes": 200, "mean": 480.5, "median": 485.0, "iqm": 482.2, "iqm_low": 479.0, "iqm_high": 486.0}
REPORT = {
    "env_steps": 1_234_567,
    "greedy": True,
    "episodes": 100,
    "score": {**SCORE, "std": 12.2, "least": 400.0, "most": 500.0},
    "seeds": [{"seed": 1}, {"seed": 2}],
}
SPEC = EnvSpec(
    {"camera": ArraySpec((3, 40, 40), "uint8"), "joints": ArraySpec((4,), "float32")},
    ContinuousSpec((-1.0,), (1.0,), (1,)),
)


def leave_run(run_dir: Path, summary: dict[str, Any] | None = None) -> Path:
    leave_trained(
        run_dir, SPEC, EnvConfig(id="Robot-v0", options={"speed": 2}, frame_stack=2), ModelConfig(gru=8, layers=[8])
    )
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def card_of(run_dir: Path) -> str:
    return write_card(run_dir).read_text()


def test_card_of_few_episodes_says_how_many_they_were(tmp_path: Path) -> None:
    card = card_of(leave_run(tmp_path / "run", {**SUMMARY, "episodes": 12}))
    assert "| mean return of the last 12 training episodes | 475.2 |" in card
    assert "name: mean return of the last 12 training episodes" in card


def test_card_tells_what_how_long_and_how_good(tmp_path: Path) -> None:
    card = card_of(leave_run(tmp_path / "run", SUMMARY))
    assert "1,234,567 environment steps in 10.0 minutes (2,058 a second), 4,321 updates, 987 episodes" in card
    for words in (
        "# Robot-v0",
        "| mean return of the last 100 training episodes | 475.2 |",
        '| environment | `Robot-v0` with `{"speed":2}` |',
        "| observation `camera` | uint8[3, 40, 40] |",
        "| action | continuous[1] from -1 to 1 |",
        "| memory | GRU of 8 |",
        "| commit | abc123 |",
        "| trouble: rows dropped: partial_unroll | 7 |",
        "| checkpoint | `checkpoints/000000000100` |",
    ):
        assert words in card


def test_card_counts_the_parameters_of_the_model(tmp_path: Path) -> None:
    """Running statistics, which PopArt and normalized observations have, are no parameters."""
    run_dir = leave_trained(tmp_path / "run", model=ModelConfig(layers=[8], popart=True, normalize=True))
    # 4 → 8 → 2 and 1
    assert f"| parameters | {4 * 8 + 8 + 8 * 2 + 2 + 8 + 1} |" in card_of(run_dir)


def test_card_names_the_algorithm_as_the_newest_checkpoint_has_it(tmp_path: Path) -> None:
    run_dir = leave_trained(tmp_path / "run")  # written before checkpoints held it
    assert "| algorithm | ppo |" in card_of(run_dir)
    resolved = {"name": "ppo", "passes": 10, "minibatches": 1, "on_policy": True}
    leave_trained(run_dir, steps=200, algorithm=resolved)
    assert "| algorithm | ppo (10 passes × 1 minibatch, on policy) |" in card_of(run_dir)


def test_card_begins_with_what_the_hub_reads(tmp_path: Path) -> None:
    _, front, _ = card_of(leave_run(tmp_path / "run", SUMMARY)).split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["tags"] == ["reinforcement-learning", "deep-reinforcement-learning", "seedrl", "Robot-v0"]
    assert found["model-index"][0]["results"][0]["metrics"][0]["value"] == 475.25


def test_card_shows_the_curve_the_newest_video_and_evaluations_that_are_there(tmp_path: Path) -> None:
    run_dir = leave_run(tmp_path / "run", SUMMARY)
    assert "](curve.png)" not in card_of(run_dir)
    for name in ("curve.png", "videos/001.mp4", "videos/002.mp4", "videos/002.gif"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).touch()
    (run_dir / "eval").mkdir()
    (run_dir / "eval/best.json").write_text(json.dumps(REPORT))
    (run_dir / "eval/other.json").write_text(json.dumps({"score": "none of ours"}))
    card = card_of(run_dir)
    assert "](curve.png)" in card
    assert "](videos/002.gif)" in card
    assert "[Video](videos/002.mp4)" in card
    [row] = [line for line in card.splitlines() if line.startswith("| evaluation")]
    assert row == (
        "| evaluation after 1,234,567 steps, acting greedily, 200 episodes of 2 seeds | "
        "480.5 ± 12.2 (median 485, IQM 482.2 [479, 486]) |"
    )


def test_card_of_a_run_that_has_not_ended_says_so(tmp_path: Path) -> None:
    card = card_of(leave_run(tmp_path / "run"))
    assert "The run has not ended cleanly yet" in card
    assert "model-index" not in card


def test_card_of_a_damaged_summary_goes_without(tmp_path: Path) -> None:
    run_dir = leave_run(tmp_path / "run")
    (run_dir / "summary.json").write_text("{")
    assert "The run has not ended cleanly yet" in card_of(run_dir)


def test_card_of_no_run_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no config\.yaml in it"):
        run_card(CardConfig(run=str(tmp_path)))


def test_card_has_a_command_that_makes_the_same_run(tmp_path: Path) -> None:
    run = RunDirectory(leave_run(tmp_path / "run"))
    config = replace(run.config(), seed=7, socket="unix:/tmp/of-this-process")
    config.algorithm.learning_rate_end, config.env.wrappers = 1e-4, ["m:W", "n:V"]
    run.claim(config)
    run.release()
    command, *overrides = shlex.split(training_command(run))[1:]
    assert command == "learner"
    ours, theirs = plain(config), plain(composed(command, overrides))
    for section in ("env", "model", "algorithm", "actors", "seed", "stop"):
        assert theirs[section] == ours[section]
    assert "of-this-process" not in card_of(run.path)


def test_card_of_a_job_has_the_command_of_the_job(tmp_path: Path) -> None:
    run = RunDirectory(leave_run(tmp_path / "run"))
    job = RunConfig(launch=LaunchConfig(engine=Engine.torchrun))
    run.write_job(job)
    command, *overrides = shlex.split(training_command(run))[1:]
    assert command == "run"
    assert composed(command, overrides).launch.engine is Engine.torchrun


# Uploading


class FakeHub:
    """What the hub was asked for."""

    def __init__(self, failing: bool = False) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._failing = failing

    def create_repo(self, repository: str, **options: Any) -> None:
        if self._failing:
            raise OSError("no network")
        self.asked.append(("create_repo", {"repository": repository, **options}))

    def upload_folder(self, **options: Any) -> None:
        self.asked.append(("upload_folder", options))

    def upload_file(self, **options: Any) -> None:
        self.asked.append(("upload_file", options))


def test_upload_takes_what_is_worth_sharing_and_nothing_else(tmp_path: Path) -> None:
    run_dir, hub = leave_run(tmp_path / "run", SUMMARY), FakeHub()
    card = write_card(run_dir)
    assert upload_run(run_dir, card, "me/robot", private=True, client=hub) == "https://huggingface.co/me/robot"
    made, folder, readme = hub.asked
    assert made == ("create_repo", {"repository": "me/robot", "private": True, "exist_ok": True})
    assert folder[1]["folder_path"] == str(run_dir)
    assert "checkpoints/000000000100/*" in folder[1]["allow_patterns"]
    assert not any(pattern in ("*", "**", "logs/*") for pattern in folder[1]["allow_patterns"])
    assert readme[1] == {"repo_id": "me/robot", "path_or_fileobj": str(card), "path_in_repo": "README.md"}


def test_upload_that_fails_says_why(tmp_path: Path) -> None:
    run_dir = leave_run(tmp_path / "run", SUMMARY)
    with pytest.raises(SeedrlError, match="me/robot could not be uploaded: no network"):
        upload_run(run_dir, write_card(run_dir), "me/robot", private=False, client=FakeHub(failing=True))


def test_upload_calls_are_those_that_the_hub_knows() -> None:
    """The real client takes the arguments that the fake one got; nothing is sent."""
    import inspect

    from huggingface_hub import HfApi

    for name, arguments in {
        "create_repo": ["repo_id", "private", "exist_ok"],
        "upload_folder": ["repo_id", "folder_path", "allow_patterns", "commit_message"],
        "upload_file": ["repo_id", "path_or_fileobj", "path_in_repo"],
    }.items():
        assert set(arguments) <= set(inspect.signature(getattr(HfApi, name)).parameters)
