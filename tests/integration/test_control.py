"""People steer actors that run: exploration, pauses, resets, other environments, farewells; each through a stream."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from seedrl.config import ControlConfig, RunConfig, SecurityConfig, StatusConfig
from seedrl.errors import ConfigError, Unauthenticated
from seedrl.job_handle import SubmittedJob
from seedrl.launching.actors import ActorFleet
from seedrl.launching.children import Child
from seedrl.launching.process_notes import ProcessNotes
from seedrl.monitoring.control import order_of, run_control
from seedrl.monitoring.control import tell as tell_members
from seedrl.monitoring.overview import run_status
from seedrl.run.context import ContextFile
from seedrl.run.directory import RunDirectory
from seedrl.status import DRAINED
from seedrl.wire.channel import Link, ask_control
from seedrl.wire.control import describe_request
from seedrl.wire.messages import ORDERS, Command, ControlRequest, MemberResult, Outcome
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands
from tests.integration.support import RunningActor, RunningLearner
from tests.integration.waiting import DEADLINE, eventually, settled


def tell(learner: RunningLearner, actor: str = "", **order: Any) -> int:
    """Return how many actors have done it."""
    if "do" in order:
        order["command"] = ORDERS[order.pop("do")]
    link = Link(learner.address, SecurityConfig())
    results = ask_control(link, ControlRequest(actor, **order), DEADLINE)
    return sum(result.outcome is Outcome.done for result in results)


def pair(start_learner: StartLearner, start_actor: StartActor, **settings: Any) -> tuple[RunningLearner, Any, Any]:
    """A learner that trains with actor-0 and actor-1."""
    learner = start_learner(**settings)
    actors = start_actor(learner.address), start_actor(learner.address)
    for actor in actors:
        eventually(lambda actor=actor: actor.requests > 5)
    return learner, *actors


def goes_on(actor: RunningActor, requests: int = 20) -> None:
    goal = actor.requests + requests
    eventually(lambda: actor.requests >= goal)


def test_epsilon_makes_one_actor_act_at_random_until_it_is_zero_again(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor)
    assert tell(learner, "actor-0", epsilon=1.0) == 1
    eventually(lambda: len(first.wrong) > 50)
    assert second.wrong == []
    assert tell(learner, "actor-0", epsilon=0.0) == 1
    goes_on(first, 4)  # what was under way has come
    before = len(first.wrong)
    goes_on(first)
    assert len(first.wrong) == before
    updates = learner.service.learning.updates
    eventually(lambda: learner.service.learning.updates > updates)
    assert learner.service.learning.skipped_updates == 0


def explored(learner: RunningLearner, name: str) -> tuple[float, float]:
    """Return the temperature and the epsilon of an actor's seats, which all have the same."""
    sessions = learner.service.inference.sessions
    (slots,) = (session.lease.slots for session in sessions.open.values() if session.name == name)
    (temperature,), (epsilon,) = set(sessions.seats.temperature[slots]), set(sessions.seats.epsilon[slots])
    return float(temperature), float(epsilon)


def test_temperature_for_all_is_that_of_actors_to_come_as_well(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor)
    assert tell(learner, temperature=1e3, epsilon=0.5) == 2  # certain as the policy is, only epsilon shows
    third = start_actor(learner.address)
    for actor in (first, second, third):
        eventually(lambda actor=actor: len(actor.wrong) > 10)
    assert {explored(learner, name) for name in ("actor-0", "actor-1", "actor-2")} == {(1e3, 0.5)}


def test_paused_actor_keeps_its_session_however_long_and_goes_on_where_it_was(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(serving__max_silence=1.0)
    first = start_actor(learner.address, step_deadline=1.0)
    second = start_actor(learner.address)
    for actor in (first, second):
        eventually(lambda actor=actor: actor.requests > 5)
    sessions, pools = set(learner.service.inference.sessions.open), len(first.pools)
    assert tell(learner, "actor-0", do="pause") == 1
    paused = next(each for each in learner.service.inference.sessions.open.values() if each.name == "actor-0")
    requests = settled(lambda: paused.traffic.requests)  # what was under way has come
    updates = learner.service.learning.updates
    eventually(lambda: learner.service.learning.updates > updates + 5)  # the others train on
    goes_on(second, 200)
    eventually(lambda: time.monotonic() > paused.traffic.heard + 3)  # several times what it may be silent for
    assert paused.traffic.requests == requests
    assert set(learner.service.inference.sessions.open) == sessions
    assert tell(learner, "actor-0", do="resume") == 1
    goes_on(first)
    assert set(learner.service.inference.sessions.open) == sessions
    assert first.wrong == second.wrong == []
    assert len(first.pools) == pools


def test_paused_actors_are_shown_as_paused_and_not_as_a_bottleneck(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor)
    status = learner.service.monitor.status
    assert tell(learner, do="pause") == 2
    eventually(lambda: (status().state, status().verdict.bottleneck) == ("paused", "paused"))
    assert tell(learner, "actor-0", do="resume") == 1
    eventually(lambda: status().state == "running" and "1 of 2 actors is paused" in status().verdict.evidence)
    assert tell(learner, do="resume") == 2
    eventually(lambda: status().verdict.bottleneck != "paused")
    assert first.wrong == second.wrong == []


def test_reset_makes_the_environments_of_an_actor_anew_and_those_of_others_go_on(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor)
    assert tell(learner, "actor-0", do="reset") == 1
    eventually(lambda: len(first.pools) == 2 and first.requests > 5)
    assert len(second.pools) == 1
    eventually(lambda: first.pools[0].closed)
    assert first.pools[0].job.seed != first.pools[1].job.seed
    assert first.wrong == second.wrong == []


def test_options_reach_the_environments_of_the_actor_they_are_meant_for(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor, env__options={"speed": 1, "colour": "red"})
    tell(learner, "actor-0", options={"speed": 2}, do="reset")
    eventually(lambda: len(first.pools) == 2 and first.requests > 5)
    assert first.pools[-1].job.options == {"speed": 2, "colour": "red"}
    tell(learner, options={"colour": "blue"}, do="reset")
    eventually(lambda: len(first.pools) == 3 and len(second.pools) == 2 and second.requests > 5)
    assert first.pools[-1].job.options == {"speed": 2, "colour": "blue"}
    assert second.pools[-1].job.options == {"speed": 1, "colour": "blue"}


def test_drained_actor_ends_with_success_and_the_others_train_on(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner, first, second = pair(start_learner, start_actor)
    assert tell(learner, "actor-0", do="drain") == 1
    first.join()
    assert first.says(DRAINED)
    goes_on(second)
    eventually(lambda: len(learner.service.inference.sessions.open) == 1)


def test_supervisor_lets_a_drained_actor_be_and_brings_back_one_that_ended_for_another_reason(tmp_path: Path) -> None:
    notes = ProcessNotes(ContextFile(tmp_path), has_torchrun=False)
    fleet = ActorFleet(RunConfig(), "unix:/private/learner.sock", tmp_path / "logs", notes)
    for words, comes_back in ((DRAINED, False), ("Done: 5 of 5 steps", True)):
        (tmp_path / "logs" / "actor-0.log").write_text(f"actor actor-0: {words}\n")
        actor = Child("actor-0", start=lambda: pytest.fail("started at once"))
        fleet._consider_restart(0, actor, 0)
        assert actor.is_due  # so nobody asks again why it ended
        assert not actor.start_if_due()
        assert (actor._due < float("inf")) is comes_back


# What is refused.


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"actor": "nobody", "do": "pause"}, r"actor: expected one that is connected \(actor-0\), saw nobody"),
        ({"temperature": 0.0}, "temperature: expected"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"epsilon": 1.5}, "epsilon: expected 0 to 1, saw 1.5"),
        ({"command": Command.DRAIN}, "command: expected one of pause, resume, reset, drain, move"),
        ({}, "expected at least one change"),
    ],
)
def test_control_of_what_cannot_be_is_refused_in_words(
    start_learner: StartLearner, start_actor: StartActor, order: dict[str, Any], words: str
) -> None:
    learner = start_learner()
    actor = start_actor(learner.address)
    eventually(lambda: actor.requests > 5)
    with pytest.raises(ConfigError, match=words):
        tell(learner, **order)
    goes_on(actor)


def test_control_by_strangers_is_refused(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEDRL_TOKEN", "a-token-of-the-tests-0123456789")
    learner = start_learner()
    actor = start_actor(learner.address)
    eventually(lambda: actor.requests > 5)
    monkeypatch.setenv("SEEDRL_TOKEN", "another-token-of-tests-0123456789")
    with pytest.raises(Unauthenticated):
        tell(learner, "actor-0", do="drain")
    goes_on(actor)


# The command.


def test_order_of_a_command_line() -> None:
    assert order_of(ControlConfig(do=["pause"], actor="a")) == ControlRequest("a", command=Command.PAUSE)
    assert order_of(ControlConfig(temperature=0.5)) == ControlRequest(temperature=0.5)
    assert order_of(ControlConfig(options={"a": 1})) == ControlRequest(command=Command.RESET, options={"a": 1})
    assert order_of(ControlConfig(do=["move"])) == ControlRequest(command=Command.REDIRECT, open=False)
    assert order_of(ControlConfig(do=["move"], actor="a")) == ControlRequest("a", command=Command.REDIRECT)
    assert order_of(ControlConfig(do=["open"])) == ControlRequest(open=True)
    with pytest.raises(ConfigError, match="leave actor= out"):
        order_of(ControlConfig(do=["open"], actor="a"))
    for wrong in (ControlConfig(), ControlConfig(do=["stop"]), ControlConfig(do=["pause", "reset"])):
        with pytest.raises(ConfigError, match="pause, resume, reset, drain, move, open"):
            order_of(wrong)
    assert describe_request(ControlRequest(epsilon=0.1, command=Command.RESET)) == "epsilon=0.1, reset"


def test_control_command_pauses_and_steers_a_running_actor(
    start_learner: StartLearner, start_actor: StartActor, commands: Commands
) -> None:
    learner = start_learner()
    actor = start_actor(learner.address)
    eventually(lambda: actor.requests > 5)
    code, out, err = commands.run("control", "pause", f"learner={learner.address}", "actor=actor-0", "epsilon=0.25")
    assert (code, out) == (0, "told 1 actor: epsilon=0.25, pause\n  actor-0: done\n"), err
    (session,) = learner.service.inference.sessions.open.values()
    assert session.is_paused
    assert explored(learner, "actor-0") == (1.0, 0.25)
    code, _, err = commands.run("control", "pause", f"learner={learner.address}", "actor=actor0")
    assert code == 2
    assert "expected one that is connected (actor-0), saw actor0; did you mean actor-0?" in err


# Members of several ranks, by name.


class TwoRanks:
    """Two learners whose run directories look like those of two ranks, with actor-0 and actor-1 at them."""

    def __init__(self, start_learner: StartLearner, start_actor: StartActor, directory: Path) -> None:
        self.learners = [start_learner(run_dir=str(path)) for path in (directory, directory / "ranks/1")]
        settings = directory / "config.yaml"
        settings.write_text(re.sub(r"(?m)^(ranks:\n  count): 1$", r"\1: 2", settings.read_text()))
        assert RunDirectory(directory).config().ranks.count == 2
        self.actors = [start_actor(learner.address) for learner in self.learners]
        for actor, path in zip(self.actors, (directory, directory / "ranks/1"), strict=True):
            eventually(lambda actor=actor: actor.requests > 5)
            eventually(lambda path=path: any(m.streams_to for m in ContextFile(path).read().members.values()))
        self.run = str(directory)

    @property
    def paused(self) -> list[bool]:
        sessions = [learner.service.inference.sessions for learner in self.learners]
        return [session.is_paused for table in sessions for session in table.open.values()]

    def tell(self, *do: str, **who: Any) -> list[tuple[str, int, str]]:
        results = tell_members(ControlConfig(do=list(do), run=self.run, **who))
        return [(result.name, result.rank, str(result.outcome)) for result in results]


@pytest.fixture
def two_ranks(start_learner: StartLearner, start_actor: StartActor, tmp_path: Path) -> TwoRanks:
    return TwoRanks(start_learner, start_actor, tmp_path / "two")


def test_members_are_addressed_by_name_by_rank_and_all_together(two_ranks: TwoRanks) -> None:
    assert two_ranks.tell("pause") == [("actor-0", 0, "done"), ("actor-1", 1, "done")]
    assert two_ranks.paused == [True, True]
    assert two_ranks.tell("resume", rank=1) == [("actor-1", 1, "done")]
    assert two_ranks.paused == [True, False]
    assert two_ranks.tell("pause", actor="actor-1") == [("actor-1", 1, "done")]
    assert two_ranks.paused == [True, True]
    handle = SubmittedJob(Path(two_ranks.run), process=None, written_before=0.0)  # type: ignore[arg-type]
    assert handle.control("resume", rank=0) == [MemberResult("actor-0")]
    assert two_ranks.paused == [False, True]
    shown = {rank: [actor.name for actor in actors] for rank, actors in handle.members().items()}
    assert shown == {0: ["actor-0"], 1: ["actor-1"]}
    assert [actor.name for actor in handle.members(actor="actor-1")[1]] == ["actor-1"]


def test_members_that_there_are_not_are_refused_with_the_nearest_name(two_ranks: TwoRanks) -> None:
    with pytest.raises(ConfigError, match=r"\(actor-0, actor-1\), saw actor-11; did you mean actor-1\?"):
        two_ranks.tell("pause", actor="actor-11")
    with pytest.raises(ConfigError, match=r"rank=2: expected one with a run context here \(0, 1\)"):
        two_ranks.tell("pause", rank=2)
    with pytest.raises(ConfigError, match="move empties one endpoint, and there are several"):
        two_ranks.tell("move")
    with pytest.raises(ConfigError, match="rank=1 is looked up in a run directory"):
        tell_members(ControlConfig(do=["pause"], learner=two_ranks.learners[0].address, rank=1))
    assert two_ranks.paused == [False, False]


def test_member_that_has_left_is_gone_and_says_when(two_ranks: TwoRanks, capsys: pytest.CaptureFixture[str]) -> None:
    assert two_ranks.tell("drain", actor="actor-1") == [("actor-1", 1, "done")]
    two_ranks.actors[1].join()
    eventually(lambda: not two_ranks.learners[1].service.inference.sessions.open)
    assert two_ranks.tell("pause", actor="actor-1") == [("actor-1", 1, "gone")]
    with pytest.raises(ConfigError, match=r"1 of 1 have not done it; actor-1: last seen 0:\d\d ago"):
        run_control(ControlConfig(do=["pause"], actor="actor-1", run=two_ranks.run))
    assert capsys.readouterr().out.startswith("told 0 actors, 1 gone: pause\n  actor-1: gone; last seen 0:")
    with pytest.raises(ConfigError, match=r"actor=actor-1 is gone: last seen"):
        run_status(StatusConfig(run=two_ranks.run, actor="actor-1"))


def test_status_of_one_actor_is_shown_with_the_rank_that_serves_it(
    two_ranks: TwoRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    run_status(StatusConfig(run=two_ranks.run, actor="actor-1", json=True))
    status = json.loads(capsys.readouterr().out)
    assert [actor["name"] for actor in status["actors"]] == ["actor-1"]
    assert status["address"] == two_ranks.learners[1].address
    run_status(StatusConfig(run=two_ranks.run, rank=1, json=True))
    assert json.loads(capsys.readouterr().out)["address"] == two_ranks.learners[1].address


def test_members_of_a_rank_that_does_not_answer_are_gone(two_ranks: TwoRanks) -> None:
    with ContextFile(Path(two_ranks.run) / "ranks/1").change() as context:
        context.address = "127.0.0.1:1"  # where nobody listens
    assert two_ranks.tell("pause") == [("actor-0", 0, "done"), ("actor-1", 1, "gone")]
