"""Run directories: made, taken up again, refused."""

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from seedrl.algorithms.settings import Optimizer
from seedrl.commandline.main import compose
from seedrl.config import Engine, LaunchConfig, LearnerConfig, RunConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.launching.overrides import override
from seedrl.run import reserve
from seedrl.run.directory import RunDirectory, check_initial_weights, directory_name, plain, restored


def prepared(config: LearnerConfig) -> RunDirectory:
    """Return a run directory as a learner that ends at once leaves it."""
    run = RunDirectory.prepare(config)
    run.claim(config)
    run.release()
    return run


def begun(config: LearnerConfig) -> RunDirectory:
    """Return a run directory as a learner that has trained leaves it."""
    run = prepared(config)
    run.append_metrics({"env_steps": 1})
    return run


def config_for(directory: Path | str) -> LearnerConfig:
    return LearnerConfig(run_dir=str(directory))


def settings_in(directory: Path) -> dict[str, object]:
    settings: dict[str, object] = yaml.safe_load((directory / "config.yaml").read_text())
    return settings


def test_run_directory_new_is_made_with_its_complete_settings(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a" / "b")
    run = prepared(config)
    assert run.path == tmp_path / "a" / "b"
    assert settings_in(run.path) == plain(config)
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", ".processes", ".reserve", "config.yaml"]


def test_run_directory_without_a_name_gets_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names differ even within one second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seedrl.run.directory.time.strftime", lambda _: "20260102-030405")
    paths = [prepared(LearnerConfig()).path for _ in range(3)]
    assert [str(path) for path in paths] == [
        "runs/CartPole-v1/20260102-030405",
        "runs/CartPole-v1/20260102-030405-2",
        "runs/CartPole-v1/20260102-030405-3",
    ]


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("gymnasium:CartPole-v1", "gymnasium-CartPole-v1"),
        ("my_module:make", "my_module-make"),
        ("gfootball/academy_empty_goal-v1", "gfootball-academy_empty_goal-v1"),
        ("own/my game", "own-my-game"),
        ("../..", "env"),
    ],
)
def test_run_directory_of_any_environment_has_a_plain_name(env_id: str, name: str) -> None:
    assert directory_name(env_id) == name


def test_run_directory_with_a_traceback_to_look_at_is_not_discarded(tmp_path: Path) -> None:
    run = prepared(config_for(tmp_path / "run"))
    run.logs.mkdir()
    (run.logs / "actor-0.log").write_text("Traceback (most recent call last):\n")
    assert not run.discard_if_unused()
    (run.logs / "actor-0.log").write_text("there is no such environment\n")
    assert run.discard_if_unused()
    assert not run.path.exists()


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such directory"), ("empty", "no checkpoint in it")])
def test_initial_weights_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        check_initial_weights(LearnerConfig(init_from=str(tmp_path / name)))


@pytest.mark.parametrize("name", ["", "run", "run/checkpoints/1"])
def test_initial_weights_that_are_there_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/1/manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    check_initial_weights(LearnerConfig(init_from=name))
    check_initial_weights(LearnerConfig(init_from="gone since", run_dir="run"))


def test_run_directory_existing_empty_directory_is_taken(tmp_path: Path) -> None:
    prepared(config_for(tmp_path))
    assert (tmp_path / "config.yaml").exists()


def test_run_directory_with_logs_but_no_settings_is_taken(tmp_path: Path) -> None:
    """`seedrl run` opens the logs of its actors before the learner has written its settings."""
    (tmp_path / "logs").mkdir()
    prepared(config_for(tmp_path))
    assert (tmp_path / "config.yaml").exists()


def test_run_directory_same_settings_resume_it(tmp_path: Path) -> None:
    prepared(config_for(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert prepared(config_for(tmp_path)).checkpoints == tmp_path / "checkpoints"


def test_run_directory_settings_survive_yaml(tmp_path: Path) -> None:
    """Small numbers, enums, nested options: written, read back, and still the same run."""
    config = config_for(tmp_path)
    config.algorithm.learning_rate = 1e-5
    config.algorithm.optimizer = Optimizer.rmsprop
    config.env.options = {"episodic_life": True, "list": [1, 2.5, "x"]}
    config.model.layers = [3, 4]
    prepared(config)
    prepared(config)


def other_run_settings(config: LearnerConfig) -> None:
    config.stop.env_steps = 5
    config.actors.count = 7
    config.listen = "127.0.0.1:1"
    config.checkpoint.keep = 9


def test_run_directory_settings_that_may_change_are_taken_over(tmp_path: Path) -> None:
    prepared(config_for(tmp_path))
    changed = config_for(tmp_path)
    other_run_settings(changed)
    prepared(changed)
    assert settings_in(tmp_path) == plain(changed)


def set_seed(config: LearnerConfig) -> None:
    config.seed = 2


def set_lockstep(config: LearnerConfig) -> None:
    config.lockstep = True


def set_env(config: LearnerConfig) -> None:
    config.env.id = "Pong-v5"


def set_option(config: LearnerConfig) -> None:
    config.env.options["episodic_life"] = True


def set_layers(config: LearnerConfig) -> None:
    config.model.layers = [32]


def set_optimizer(config: LearnerConfig) -> None:
    config.algorithm.optimizer = Optimizer.rmsprop


def set_initial_weights(config: LearnerConfig) -> None:
    config.init_from = "elsewhere"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (set_seed, "seed was 1, is 2"),
        (set_lockstep, "lockstep was False, is True"),
        (set_env, "env.id was CartPole-v1, is Pong-v5"),
        (set_option, "env.options.episodic_life was None, is True"),
        (set_layers, "model.layers was [64, 64], is [32]"),
        (set_optimizer, "algorithm.optimizer was adam, is rmsprop"),
        (set_initial_weights, "init_from was , is elsewhere"),
    ],
)
def test_run_directory_other_settings_are_refused_by_name(
    tmp_path: Path, change: Callable[[LearnerConfig], None], difference: str
) -> None:
    begun(config_for(tmp_path))
    before = (tmp_path / "config.yaml").read_text()
    changed = config_for(tmp_path)
    change(changed)
    with pytest.raises(RunDirectoryError) as caught:
        prepared(changed)
    assert f"{tmp_path} holds a run with other settings: {difference}. " in str(caught.value)
    assert (tmp_path / "config.yaml").read_text() == before


def test_run_directory_several_other_settings_are_all_named(tmp_path: Path) -> None:
    begun(config_for(tmp_path))
    changed = config_for(tmp_path)
    set_seed(changed)
    set_layers(changed)
    other_run_settings(changed)
    with pytest.raises(RunDirectoryError, match=r"settings: model.layers was .*; seed was 1, is 2\. These belong"):
        prepared(changed)


def test_run_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match="is not empty and no run directory"):
        prepared(config_for(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("inside", ["", "further/below"])
def test_run_directory_that_is_a_file_is_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"cannot be created: .*; give another run_dir"):
        prepared(config_for(tmp_path / "file" / inside))


@pytest.mark.parametrize(
    "content", [b"a: [1", b"", b"just words", b"\xff\xfe\x00broken", bytes(20)], ids=lambda content: repr(content)
)
def test_run_directory_settings_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"config\.yaml cannot be read"):
        prepared(config_for(tmp_path))
    assert (tmp_path / "config.yaml").read_bytes() == content


def test_run_directory_settings_of_an_older_version_name_what_is_missing(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    begun(config)
    settings = plain(config)
    del settings["algorithm"]["discount"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(RunDirectoryError, match=r"algorithm.discount was None, is 0.99"):
        prepared(config)


def test_run_directory_metrics_are_appended_line_by_line(tmp_path: Path) -> None:
    run = prepared(config_for(tmp_path))
    rows = [{"env_steps": 1, "loss": 0.5}, {"env_steps": 2, "loss": None}]
    for row in rows:
        run.append_metrics(row)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize("torn", ["", '{"env_steps": 1, "lo', '{"env_steps": 1}'])
def test_run_directory_metrics_after_a_torn_line_begin_a_new_one(tmp_path: Path, torn: str) -> None:
    run = prepared(config_for(tmp_path))
    run.metrics.write_text('{"env_steps": 0}\n' + torn)
    for steps in (2, 3):
        run.append_metrics({"env_steps": steps})
    lines = run.metrics.read_text().splitlines()
    assert lines == ['{"env_steps": 0}', *([torn] if torn else []), '{"env_steps": 2}', '{"env_steps": 3}']


def test_run_directory_numbers_its_processes_whatever_they_leave_behind(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        run = prepared(config_for(tmp_path))
        numbers.append(run.earlier_processes)
        run.release()
    assert numbers == [0, 1, 2]


def test_run_directory_summary_is_written_over_the_one_before(tmp_path: Path) -> None:
    run = prepared(config_for(tmp_path))
    run.write_summary({"status": "interrupted", "reason": "a longer text than the next"})
    run.write_summary({"status": "done"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "done"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        ".processes",
        ".reserve",
        "config.yaml",
        "summary.json",
    ]


class FullDisk:
    """Stands in for the flush to a disk: it fails unless the reserve was given up."""

    def __init__(self, directory: Path) -> None:
        self._reserve = directory / ".reserve"

    def __call__(self, descriptor: int) -> None:
        if not self._reserve.exists() or self._reserve.stat().st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_run_directory_on_a_full_disk_writes_small_files_with_its_reserve_and_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(config_for(tmp_path))
    monkeypatch.setattr(os, "fsync", FullDisk(tmp_path))
    for number in range(3):
        run.write_summary({"status": f"{number}"})
        assert json.loads((tmp_path / "summary.json").read_text()) == {"status": f"{number}"}
        assert (tmp_path / ".reserve").stat().st_size == reserve.BYTES
    (tmp_path / ".reserve").unlink()
    with pytest.raises(OSError, match="No space left"):
        run.write_summary({"status": "3"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "2"}


def test_run_directory_is_resumed_on_a_disk_without_any_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart used to end with a traceback, because it wrote the same settings again."""
    prepared(config_for(tmp_path))
    (tmp_path / ".reserve").unlink()
    monkeypatch.setattr(os, "fsync", FullDisk(tmp_path))
    run = prepared(config_for(tmp_path))
    assert run.earlier_processes == 1


def test_run_directory_new_on_a_full_disk_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", FullDisk(tmp_path))
    with pytest.raises(RunDirectoryError, match=r"config\.yaml cannot be written: No space left on device"):
        prepared(config_for(tmp_path))


def test_run_directory_claimed_by_another_learner_is_refused_and_left_alone(tmp_path: Path) -> None:
    first, second = config_for(tmp_path), config_for(tmp_path)
    second.stop.env_steps = 7
    run = RunDirectory.prepare(first)
    run.claim(first)
    with pytest.raises(RunDirectoryError, match="another learner is running in"):
        RunDirectory.prepare(second).claim(second)
    assert settings_in(tmp_path) == plain(first)
    run.release()
    assert settings_in(prepared(second).path) == plain(second)


def test_run_directory_metrics_that_are_not_finite_are_null(tmp_path: Path) -> None:
    run = prepared(config_for(tmp_path))
    run.append_metrics({"loss": float("nan"), "steps": 3})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "steps": 3}


def test_run_directory_of_another_algorithm_is_refused_by_its_name_alone(tmp_path: Path) -> None:
    """Its other settings differ as well, for they follow from it; they are not listed."""
    begun(config_for(tmp_path))
    changed = config_for(tmp_path)
    changed.algorithm.name = "vtrace"
    changed.algorithm.learning_rate = 0.5
    words = (
        f"{tmp_path} is trained with ppo, and algorithm.name=vtrace cannot resume it; give algorithm.name=ppo, "
        f"or another run_dir, which init_from={tmp_path} starts with the weights of this one"
    )
    with pytest.raises(RunDirectoryError, match=f"^{re.escape(words)}$"):
        prepared(changed)


def test_run_directory_of_a_start_that_failed_takes_other_settings(tmp_path: Path) -> None:
    """Nothing was trained with the old ones."""
    prepared(config_for(tmp_path))
    changed = config_for(tmp_path)
    set_layers(changed)
    prepared(changed)
    assert settings_in(tmp_path) == plain(changed)


# Resuming.


def test_resumed_settings_are_those_of_the_run_and_of_its_job(tmp_path: Path) -> None:
    job = RunConfig(run_dir=str(tmp_path), listen="10.0.0.1:50051", launch=LaunchConfig(engine=Engine.ray))
    job.model.lstm, job.stop.env_steps = 8, 77
    learner = replace(restored(LearnerConfig, plain(job)), listen="10.0.0.7:41234")
    learner.ranks.advertise = "10.0.0.7"  # as the engine tells its learner
    run = RunDirectory.prepare(job)
    run.write_job(job)
    run.claim(learner)
    run.release()
    assert run.settings_to_resume(RunConfig) == job
    assert run.settings_to_resume(LearnerConfig).listen == "10.0.0.7:41234"


def test_resumed_settings_have_no_socket_of_an_earlier_process(tmp_path: Path) -> None:
    config = replace(config_for(tmp_path), listen="", socket="unix:/tmp/seedrl-x/learner.sock")
    run = prepared(config)
    assert "learner.sock" not in (tmp_path / "config.yaml").read_text()
    assert run.settings_to_resume(RunConfig).listen == ""
    assert run.settings_to_resume(LearnerConfig).listen == LearnerConfig().listen


def resumed(run: Path, *words: str, command: str = "run") -> RunConfig:
    config: RunConfig = compose(command, [override("run_dir", str(run)), *words])
    return config


def test_resuming_composes_words_on_top_of_the_settings_of_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "it's, a = run"
    words = ["env=catch", "model.lstm=32", "stop.env_steps=777", "+env.options.height=7", "actors.count=3"]
    first = compose("run", [*words, override("run_dir", str(run_dir))])
    begun(first)
    RunDirectory(run_dir).write_job(first)
    assert resumed(run_dir) == first
    more = resumed(run_dir, "stop.env_steps=1000000", "actors.count=1")
    assert more == replace(first, stop=replace(first.stop, env_steps=1_000_000), actors=replace(first.actors, count=1))
    RunDirectory.prepare(more)
    assert resumed(run_dir, *words) == first  # the line of its start
    learner = resumed(run_dir, command="learner")
    assert (learner.env, learner.model, learner.stop) == (first.env, first.model, first.stop)


@pytest.mark.parametrize(
    ("word", "difference"),
    [
        ("model.lstm=8", "model.lstm was 0, is 8"),
        ("env=cartpole", "env.id was Catch-v0, is CartPole-v1"),
        ("env.id=CartPole-v1", "env.id was Catch-v0, is CartPole-v1"),
        ("algorithm=ppo", "is trained with vtrace, and algorithm.name=ppo cannot resume it"),
        ("seed=3", "seed was 1, is 3"),
    ],
)
def test_resuming_with_a_word_that_belongs_to_the_run_is_refused_by_name(
    tmp_path: Path, word: str, difference: str
) -> None:
    begun(compose("run", ["env=catch", override("run_dir", str(tmp_path))]))
    with pytest.raises(RunDirectoryError, match=re.escape(difference)):
        RunDirectory.prepare(resumed(tmp_path, word))
