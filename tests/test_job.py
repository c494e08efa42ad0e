"""The builder gives what the command line gives, and processes know who they are."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from seedrl.commandline.main import compose
from seedrl.config import Engine, LaunchConfig, RoleConfig
from seedrl.errors import ConfigError, JobFailed, RunDirectoryError
from seedrl.job import Job
from seedrl.job_handle import LOG, JobStatus, SubmittedJob
from seedrl.launching.environment import variables
from seedrl.run.context import ContextFile, State
from seedrl.run.directory import RunDirectory
from seedrl.run.identity import Identity, identity
from tests.documented import ROOT, write_program


def test_builder_makes_exactly_what_the_command_line_makes() -> None:
    built = (
        Job()
        .env("Pong-v5", episodic_life=True)
        .learner(ranks=2, device="cpu", gpus=0.5, env={"OMP_NUM_THREADS": "2"})
        .actors(total=8, per_node=4, envs=64, cpus=2, selector={"pool": "cpu"})
        .place("collocate", "spread")
        .restarts(learner=7, actors=9)
        .environment(TZ="UTC")
        .on("ray", address="head:6379")
        .set("algorithm.learning_rate=1e-4", seed=3)
        .build()
    )
    words = """env=any env.id=Pong-v5 +env.options.episodic_life=true ranks.count=2 device=cpu launch.learner.gpus=0.5
        +launch.learner.env.OMP_NUM_THREADS='2' actors.count=8 actors.envs=64 launch.per_node=4 launch.actor.cpus=2
        +launch.actor.selector.pool=cpu launch.placement=[collocate,spread] max_restarts=7
        actors.max_restarts=9 +launch.env.TZ=UTC launch=ray launch.address='head:6379' algorithm.learning_rate=1e-4
        seed=3"""
    assert built.config == compose("run", words.split())
    assert built.config.launch.engine is Engine.ray


def test_builder_takes_presets_by_name() -> None:
    assert Job().env("pong").build().config == compose("run", ["env=pong"])


def test_builder_leaves_earlier_jobs_alone() -> None:
    job = Job().env("pong")
    job.actors(total=5)
    assert job.build().config.actors.count == 1


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job().learner(ranks=0), r"^ranks.count=0 must be at least 1$"),
        (Job().env("own"), r"^env.id=own: actors bring this environment, .*`seedrl learner`"),
        (Job().learner(ranks=2), r"^ranks.count=2 needs an engine that starts several ranks: launch=torchrun"),
        (Job().actors(total=8, per_node=4), r"^launch.per_node=4 is less than the 8 actors on this machine"),
        (Job().actors(total=1, at_most=8, per_node=4), r"^launch.per_node=4 is less than the 8 actors"),
        (Job().learner(ranks=2).actors(total=1).on("torchrun"), r"leaves some of ranks.count=2 without an actor"),
        (Job().on("ray").actors(at_most=3, per_node=2), r"at_most=3 and launch.per_node=2 contradict"),
        (
            Job().on("ray").actors(at_most=3).place("collocate"),
            r"and launch.placement=\[collocate\] contradict",
        ),
        (Job().on("kubernetes").env("pong"), r"starts nothing by itself.*: seedrl render out=manifests env=pong$"),
        (Job().learner(cpus=-1), r"^launch.learner: cpus, gpus and memory_gb must not be negative$"),
        (Job().learner(brains=2), r"brains"),
        (
            Job().set("algoritm.batch_size=3"),
            r"^there is no setting algoritm.batch_size; did you mean algorithm.batch_size\?$",
        ),
        (Job().set(seed="many"), r"seed.*"),
        (Job("not an override"), r"not an override"),
    ],
)
def test_builder_refuses_in_words_what_submit_would_refuse(job: Job, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        job.build()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [lambda: Job().on("slurm"), lambda: Job().place("per_node")])
def test_builder_names_the_choices_there_are(wrong: Callable[[], Job]) -> None:
    with pytest.raises(ConfigError, match=r"is none of (local, torchrun, ray, kubernetes|collocate, spread)$"):
        wrong()


def test_builder_gives_a_preset_other_options_and_new_ones() -> None:
    options = Job().env("atari", episodic_life=True, img_height=64).build().config.env.options
    assert (options["episodic_life"], options["img_height"], options["noop_max"]) == (True, 64, 30)


class Started(NamedTuple):
    directory: Path
    overrides: list[str]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Submit jobs without starting them, in a directory of the test; return what would have been started."""
    jobs: list[Started] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SubmittedJob, "start", lambda directory, overrides: jobs.append(Started(directory, overrides)))
    return jobs


def test_builder_line_of_the_readme_is_a_job_that_can_be_submitted(started: list[Started]) -> None:
    [line] = re.findall(r"`(Job\(\).+?)`", (ROOT / "README.md").read_text())
    exec(line.removesuffix(".wait()"), {"Job": Job})  # noqa: S102
    [(directory, overrides)] = started
    config = compose("run", overrides)
    assert (config.launch.name, config.run_dir) == ("name", "runs/CartPole-v1/name")
    assert directory == Path("runs/CartPole-v1/name").absolute()


def test_builder_submits_under_a_name_with_quotes_and_spaces(started: list[Started]) -> None:
    Job().env("cartpole").build().submit("it's, the = third")
    config = compose("run", started[0].overrides)
    assert (config.launch.name, config.run_dir) == ("it's, the = third", "runs/CartPole-v1/it's, the = third")


def test_builder_does_not_submit_a_run_with_other_settings(started: list[Started]) -> None:
    job = Job().env("cartpole")
    job.build().submit("x")
    run = RunDirectory.prepare(compose("run", started[0].overrides))
    run.claim(compose("run", started[0].overrides))
    run.append_metrics({"env_steps": 1})
    run.release()
    job.build().submit("x")
    with pytest.raises(RunDirectoryError, match="seed was 1, is 2"):
        job.set(seed=2).build().submit("x")
    assert len(started) == 2


# The handle.


def handle_on(directory: Path, program: str, stdin: int = subprocess.DEVNULL) -> SubmittedJob:
    """Return a handle on a process that is no job."""
    (directory / "logs").mkdir(parents=True)
    (directory / LOG).touch()
    written_before = ContextFile(directory).read_or_new().written
    return SubmittedJob(directory, subprocess.Popen([sys.executable, "-c", program], stdin=stdin), written_before)


def test_handle_follows_a_job_from_its_start_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with ContextFile(tmp_path / "run").change() as context:
        context.state, context.reason = State.DONE, "an earlier life"
    handle = handle_on(tmp_path / "run", "input()", stdin=subprocess.PIPE)
    assert handle.status() == JobStatus("starting")
    assert handle.summary is None
    with ContextFile(handle.directory).change() as context:
        context.state, context.reason, context.counters = State.RUNNING, "", {"env_steps": 7, "updates": 2}
    RunDirectory(handle.directory).append_metrics({"return_mean_100": None})
    assert handle.status() == JobStatus("running", env_steps=7, updates=2)
    RunDirectory(handle.directory).append_metrics({"return_mean_100": 4.5})
    assert handle.status().return_mean_100 == 4.5
    with pytest.raises(TimeoutError, match=r"still runs after 0\.01 s"):
        handle.wait(0.01)
    RunDirectory(handle.directory).write_summary({"status": "done"})
    handle._process.communicate(b"\n")
    assert handle.wait() == handle.summary == handle.stop() == {"status": "done"}
    assert handle.status().exit_code == 0


def test_handle_of_a_job_that_fails_raises_its_reason(tmp_path: Path) -> None:
    handle = handle_on(tmp_path / "run", "raise SystemExit(2)")
    (handle.directory / LOG).write_text("seedrl run: actors.groups=2 must divide actors.envs=3\n")
    with pytest.raises(
        JobFailed, match=r"failed: seedrl run: actors.groups=2 must divide .*; see logs/job.log"
    ) as failed:
        handle.wait()
    assert failed.value.exit_code == 2
    assert handle.status() == JobStatus("failed", "seedrl run: actors.groups=2 must divide actors.envs=3", exit_code=2)


@pytest.mark.long
def test_handle_program_of_the_documentation_trains(tmp_path: Path) -> None:
    path = write_program("job.py", "docs/python.md", tmp_path)
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/runs/CartPole-v1/first JobStatus(state='starting'")
    assert float(last) > 0


def test_variables_of_the_role_win_over_the_jobs_and_those_over_ours() -> None:
    launch = LaunchConfig(env={"A": "job", "B": "job"})
    ours = {"A": "ours", "B": "ours", "C": "ours"}
    assert variables(launch, RoleConfig(env={"A": "role"}), ours) == {"A": "role", "B": "job", "C": "ours"}


def test_identity_is_what_the_engine_says() -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_NAME": "n7"}
    assert identity("learner", said) == Identity("learner", 3, 4, 1, "n7")
    assert str(identity("learner", said)) == "learner rank 3/4 on n7"
    assert str(identity("learner", {})) == "learner"
