"""The run context: whole whatever happens to its writers, and who is concerned when a member dies."""

import fcntl
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from seedrl.errors import RunDirectoryError
from seedrl.run import context as contexts
from seedrl.run.context import FILE, LEARNER, LOCK, Context, ContextFile, Member, State, dump, parse
from tests.forks import processes
from tests.integration.waiting import DEADLINE


def running(*actors: str) -> Context:
    """A learner and actors that stream to it."""
    context = Context(State.RUNNING, address="unix:/tmp/learner", counters={"env_steps": 7}, checkpoint="000000000005")
    context.update(LEARNER, pid=10, incarnation=2, seen=1000.0, restarts=1, exit_code=-9, last_words="ended by SIGKILL")
    for name in actors:
        context.update(name, incarnation=1, seen=1000.0, streams_to=LEARNER, slots=16)
    return context


def test_context_written_is_what_is_read() -> None:
    context = running("actor-0", "actor-1")
    assert parse(dump(context)) == context
    assert json.loads(dump(context))["state"] == "RUNNING"


@pytest.mark.parametrize("state", State)
def test_context_states_all_survive(state: State) -> None:
    assert parse(dump(Context(state))).state is state


def test_context_of_a_later_version_with_further_fields_is_read() -> None:
    content = json.loads(dump(running("actor-0")))
    content["colour"] = content["members"]["actor-0"]["colour"] = "green"
    assert parse(json.dumps(content)) == running("actor-0")


def test_context_change_keeps_what_others_wrote_and_counts_its_revision(tmp_path: Path) -> None:
    file = ContextFile(tmp_path)
    with file.change() as context:
        context.update("actor-0", pid=7, restarts=2)
    with file.change() as context:
        context.update("actor-0", streams_to=LEARNER, slots=4)
    read = file.read()
    assert read.members["actor-0"] == Member("actor", "actor-0", pid=7, restarts=2, streams_to=LEARNER, slots=4)
    assert read.revision == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "null", '{"version": 2, "state": "ASLEEP"}'])
def test_context_that_is_none_is_refused_and_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    file = ContextFile(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"context\.json cannot be read"):
        file.read()
    with file.change() as context:
        assert context == Context()
    assert file.read().revision == 1


def test_context_change_that_raises_writes_nothing(tmp_path: Path) -> None:
    file = ContextFile(tmp_path)
    with pytest.raises(ZeroDivisionError), file.change():
        raise ZeroDivisionError
    assert not file.path.exists()


# Whom it concerns.


def test_context_affected_by_an_actor_is_only_itself() -> None:
    context = running("actor-0", "actor-1")
    assert [str(member) for member in context.affected("actor-1")] == ["actor-1 (16 slots)"]


def test_context_affected_by_the_learner_are_all_who_stream_to_it() -> None:
    context = running("actor-0", "actor-1", "actor-2")
    context.update("actor-1", streams_to="")
    assert [member.name for member in context.affected(LEARNER)] == [LEARNER, "actor-0", "actor-2"]


def test_context_affected_by_a_stranger_is_nobody() -> None:
    assert running("actor-0").affected("nobody") == []


def test_context_affected_in_a_circle_ends() -> None:
    context = Context()
    context.update("a", streams_to="b")
    context.update("b", streams_to="a")
    assert {member.name for member in context.affected("a")} == {"a", "b"}


def test_member_lease_ends_after_its_ttl() -> None:
    member = Member("actor", "actor-0", seen=100.0, ttl=10.0)
    assert member.is_leased(109.9)
    assert not member.is_leased(110.0)


# One writer at a time, and one that dies harms nothing.


def count_up(directory: Path, name: str, times: int) -> None:
    """Runs in a process of its own, and waits for the lock however busy the machine is."""
    contexts.LOCK_SECONDS = DEADLINE
    file = ContextFile(directory)
    for _ in range(times):
        with file.change() as context:
            member = context.members.get(name)
            context.update(name, restarts=(member.restarts if member else 0) + 1)


@pytest.mark.long
def test_context_changes_of_several_processes_are_all_there(tmp_path: Path) -> None:
    children = [processes.Process(target=count_up, args=(tmp_path, name, 25)) for name in ("a", "a", "b")]
    for child in children:
        child.start()
    for child in children:
        child.join()
    context = ContextFile(tmp_path).read()
    assert {name: member.restarts for name, member in context.members.items()} == {"a": 50, "b": 25}
    assert context.revision == 75


def change_until_operation(directory: Path, operation: int) -> None:
    """Runs in a process of its own: kills itself at the n-th file operation of a change."""
    count = itertools.count(1)

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove") and next(count) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with ContextFile(directory).change() as context:
        context.reason = "second"


def test_context_change_killed_at_any_file_operation_leaves_one_whole_revision(tmp_path: Path) -> None:
    outcomes = []
    for operation in range(1, 20):
        directory = tmp_path / str(operation)
        directory.mkdir()
        with ContextFile(directory).change() as context:
            context.reason = "first"
        child = processes.Process(target=change_until_operation, args=(directory, operation))
        child.start()
        child.join()
        outcomes.append(ContextFile(directory).read().reason)
        if child.exitcode == 0:
            break
        with ContextFile(directory).change() as context:  # its lock is gone with it
            context.reason = "third"
    assert outcomes == ["first"] * (len(outcomes) - 1) + ["second"]
    assert len(outcomes) > 3


def test_context_locked_by_somebody_who_is_stuck_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "LOCK_SECONDS", 0.05)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError), ContextFile(tmp_path).change():
            pass
