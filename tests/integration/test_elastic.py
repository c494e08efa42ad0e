"""`seedrl run` with more or fewer actors, as its learner needs them: real processes.

Environments and updates sleep for most of their time, so that the cores of the machine do not count.
"""

import signal
from pathlib import Path

import pytest

from seedrl.run.context import Context, ContextFile, State
from tests.integration.processes import Commands
from tests.integration.waiting import eventually

ROOT = Path(__file__).parents[2]
SECONDS = 150.0  # in which actors come or go
ENDED = ("actor-1", "actor-2")
UPDATE, STEP = 0.05, 0.05  # seconds; an update takes 16 steps, a step of an actor's four environments gives 4


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_run_grows_while_the_learner_waits_and_shrinks_once_it_does_not(commands: Commands, tmp_path: Path) -> None:
    """One actor gives 80 steps per second of the 320 that could be trained, until its environments become fast."""
    slow, run_dir = tmp_path / "slow", tmp_path / "run"
    slow.touch()
    run = commands.start(
        *("run", f"run_dir={run_dir}", "env=any", "env.id=tests.simulators:Sluggish", "display=none", "metrics=''"),
        f"env.options={{path:'{slow}',seconds:{STEP / 4}}}",
        *("model.name=tests.fakes:PacedModel", f"model.options={{seconds:{UPDATE}}}"),
        *("actors.count=1", "actors.at_most=3", "actors.envs=4", "actors.groups=1", "actors.threads=1"),
        *("algorithm=impala", "algorithm.batch_size=4", "algorithm.unroll_length=4", "stop.env_steps=1_000_000_000"),
        path=ROOT,
    )

    def context() -> Context:
        assert run.is_running, run.err
        return ContextFile(run_dir).read_or_new()

    def streaming() -> set[str]:
        return {member.name for member in context().members.values() if member.streams_to}

    eventually(lambda: context().state is State.RUNNING)
    assert len(run.children("envs_server")) == 1
    eventually(lambda: streaming() == {"actor-0", "actor-1", "actor-2"}, SECONDS)
    assert context().desired_actors == 3
    slow.unlink()
    eventually(lambda: streaming() == {"actor-0"}, SECONDS)
    eventually(lambda: len(run.children("envs_server")) == 1)

    def ends() -> list[tuple[int | None, int]]:
        return [(member.exit_code, member.restarts) for name, member in context().members.items() if name in ENDED]

    eventually(lambda: ends() == [(0, 0), (0, 0)])
    assert "the learner could use 3 actors: starting" in run.err
    assert "the learner needs only 1 actors: ending actor-1, actor-2" in run.err
    assert "restarting" not in run.err
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    assert run.left_behind() == []
