"""The run context, context.json: the state of a run, its members and its progress. Knows no process and no stream.

The file has two writers. Each changes its own part, one at a time under a lock that is held for one change:

    the learner      the state, addresses, counters, the newest checkpoint and how many actors it could use; of each
                     member what is known from streams: when it was last seen, whether it streams, its slots and its
                     incarnation (every two seconds, and with every change)
    the supervisor   of each member what is known from processes: the pid, restarts, the last exit code and its last
                     line (when a process starts or ends); and the state while there is no learner to write it

A change reads the newest content, replaces its own part and writes the whole: temporary file, fsync, rename. So every
reader sees one whole revision, whatever was killed meanwhile. The file is for people and for `seedrl status`: a run
resumes from its checkpoints, and starts a new context if this file is lost.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from seedrl.errors import RunDirectoryError
from seedrl.run.directory import write_atomically

FILE, LOCK = "context.json", ".context.lock"
VERSION = 2  # of the format
LEASE_SECONDS = 10.0
LOCK_SECONDS = 1.0  # a change takes milliseconds; a process that is stopped in the middle must not stop the others
LEARNER = "learner"  # the name of that member


class State(Enum):
    """The state of a run. FAILED may follow any state, and INIT follows every end when the run is resumed."""

    INIT = "a learner starts, or waits for its first actor"
    READY = "restored and warmed up, actors are served"
    RUNNING = "the learner trains"
    DRAINING = "the learner was asked to stop, or is done, and ends cleanly"
    DONE = "the run reached its goal or used up its steps; the reason says which"
    INTERRUPTED = "a signal ended the run, as a user or a system wished; it can be resumed"
    FAILED = "the run ended with an error; the reason says which"


ENDED = (State.DONE, State.INTERRUPTED, State.FAILED)


@dataclass(frozen=True, slots=True)
class Member:
    """A process that belongs to the run, or did so before."""

    role: str  # learner or actor
    name: str
    pid: int = 0  # 0: not of this machine, or not started by `seedrl run`
    parent: int = 0  # of a learner: the process that started it, which may be torchrun
    incarnation: int = 0  # a number that grows: processes of the learner, sessions of an actor
    seen: float = 0.0  # Unix time of its last sign of life; for people, nothing is decided by it
    ttl: float = LEASE_SECONDS  # its lease ends this long after it was seen
    streams_to: str = ""  # the member that serves it; empty for none
    slots: int = 0  # that it holds there, or held last
    restarts: int = 0
    exit_code: int | None = None  # of its last process that ended; negative: ended by a signal
    last_words: str = ""

    def is_leased(self, now: float) -> bool:
        return now < self.seen + self.ttl

    def __str__(self) -> str:
        return f"{self.name} ({self.slots} slots)" if self.slots else self.name


@dataclass(slots=True)
class Context:
    """The content of the file. Owned by the thread that has read it."""

    state: State = State.INIT
    reason: str = ""
    revision: int = 0  # changes so far
    written: float = 0.0  # Unix time
    address: str = ""  # of the learner that runs, or ran last
    metrics: str = ""
    checkpoint: str = ""  # the newest
    counters: dict[str, int] = field(default_factory=dict)  # env_steps, updates, episodes
    resumed_at: int = 0  # the update that the newest learner began with
    desired_actors: int = 0  # the number that a rank could use; 0 if it is not known yet
    members: dict[str, Member] = field(default_factory=dict)  # by name

    def update(self, name: str, **changes: Any) -> Member:
        """Replace some fields of a member, which is added if it is new."""
        role = LEARNER if name == LEARNER else "actor"
        member = replace(self.members.get(name) or Member(role, name), **changes)
        self.members[name] = member
        return member

    @property
    def has_progressed(self) -> bool:
        """Return whether the newest learner has trained at all."""
        return self.counters.get("updates", 0) > self.resumed_at

    def affected(self, name: str) -> list[Member]:
        """Return the members that the loss of one concerns: itself, and all that stream to it, directly or not."""
        concerned = [name]
        for each in concerned:  # the list grows meanwhile
            concerned += [
                member.name
                for member in self.members.values()
                if member.streams_to == each and member.name not in concerned
            ]
        return [self.members[each] for each in concerned if each in self.members]


class ContextFile:
    """The context file of a run directory. Any number of processes may read and change it."""

    def __init__(self, run_directory: Path) -> None:
        self.path = run_directory / FILE
        self._lock = run_directory / LOCK

    def read(self) -> Context:
        """Return the content; raise RunDirectoryError if there is no file, or it cannot be read."""
        try:
            return parse(self.path.read_text())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunDirectoryError(f"{self.path} cannot be read: {error!r}") from error

    def read_or_new(self) -> Context:
        try:
            return self.read()
        except RunDirectoryError:
            return Context()

    @contextlib.contextmanager
    def change(self) -> Iterator[Context]:
        """Yield the newest content and write it when the block ends. Raise OSError if that fails or takes too long."""
        with self._lock.open("w") as lock:
            _acquire(lock.fileno(), LOCK_SECONDS)
            context = self.read_or_new()
            yield context
            context.revision += 1
            context.written = time.time()
            write_atomically(self.path, dump(context))


def dump(context: Context) -> str:
    content = {"version": VERSION, **asdict(context), "state": context.state.name}
    return json.dumps(content, indent=2) + "\n"


def parse(text: str) -> Context:
    """Read what `dump` has written. Raise ValueError, KeyError or TypeError for anything else."""
    content = json.loads(text)
    if content.pop("version") != VERSION:
        raise ValueError(f"it does not have format {VERSION}")
    members = {name: Member(**_known(Member, member)) for name, member in content.pop("members").items()}
    return Context(**{**_known(Context, content), "state": State[content["state"]], "members": members})


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the fields of a later version."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _acquire(descriptor: int, seconds: float) -> None:
    """Take the lock. It is released with the descriptor, so also when the process dies."""
    import fcntl  # only Unix has it; learners run there

    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
