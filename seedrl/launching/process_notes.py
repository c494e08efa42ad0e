"""The supervisor's part of the run context: how its processes are. Knows nothing of how they are started or ended."""

import contextlib
from collections.abc import Iterable

from seedrl.launching.children import Child
from seedrl.run.context import LEARNER, Context, ContextFile, State


class ProcessNotes:
    """Reads the context of a run, and writes how its processes are into it. Owned by the supervisor."""

    def __init__(self, file: ContextFile, has_torchrun: bool) -> None:
        self.file = file
        self._has_torchrun = has_torchrun
        self._learner_pids: list[int] = []  # process ids of all learners started here, the newest last
        self._state: tuple[State, str] | None = None  # the state of the run while no learner reports it
        self._is_written = False

    def read(self) -> Context:
        """Return the context as it is now; a new one if there is none."""
        return self.file.read_or_new()

    def is_ours(self, context: Context) -> bool:
        """Return whether the newest learner has written this context."""
        return self._is_by(context, self._learner_pids[-1:])

    def learner_started(self, pid: int) -> None:
        """Note a new learner, which reports the state of the run from now on."""
        self._learner_pids.append(pid)
        self._state = None
        self.outdate()

    def set_state(self, state: State, reason: str) -> None:
        """Note the state of the run while no learner reports it."""
        self._state = (state, reason)
        self.outdate()

    def note_end(self, child: Child, code: int, words: str) -> None:
        """Note how the process of a child has ended."""
        child.exit_code, child.last_words = code, words
        self.outdate()

    def outdate(self) -> None:
        """Make the next `write` write, because a process has changed."""
        self._is_written = False

    def write(self, children: Iterable[Child]) -> None:
        """Write how the processes are into the context, once a learner started here has claimed the run directory."""
        if self._is_written:
            return
        read = self.read()
        if not self._is_by(read, self._learner_pids):
            return
        with contextlib.suppress(OSError), self.file.change() as context:
            for child in children:
                context.update(
                    child.name,
                    pid=read.members[LEARNER].pid if child.name == LEARNER and self._has_torchrun else child.pid,
                    restarts=child.starts - 1,
                    exit_code=child.exit_code,
                    last_words=child.last_words,
                )
            if self._state is not None:
                context.state, context.reason = self._state
            self._is_written = True

    def _is_by(self, context: Context, pids: Iterable[int]) -> bool:
        """Return whether a learner with one of these process ids, or torchrun with it, has written the context."""
        learner = context.members.get(LEARNER)
        return learner is not None and not {learner.pid, learner.parent}.isdisjoint(pids)
