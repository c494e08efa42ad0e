"""The learner's part of the run context: its state, its counters and the actors that stream to it.

Knows no process but its own.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run.context import LEARNER, Context, ContextFile, Member, State
from seedrl.run.stopping import Progress
from seedrl.serving.sessions import Session, SessionTable

WRITE_SECONDS = 2.0
GONE_KEPT = 20  # members that have left and have no supervisor; so the file stays small


class Membership:
    """Writes every two seconds, with every new state and whenever actors join or leave. Owned by the main thread.

    A disk that is full or gone does not stop training: what could not be written is written next time.
    """

    def __init__(
        self,
        file: ContextFile,
        sessions: SessionTable,
        serving: ServingMetrics,
        learning: LearningMetrics,
        newest_checkpoint: Callable[[], str],
        desired_actors: Callable[[], int],
        progress: Callable[[], Progress | None] = lambda: None,
        incarnation: int = 1,
    ) -> None:
        """`progress` is that of all ranks, if this one writes it; `incarnation` numbers the processes of the run."""
        self._file = file
        self._sessions = sessions
        self._serving = serving
        self._learning = learning
        self._newest_checkpoint = newest_checkpoint
        self._desired_actors = desired_actors
        self._progress = progress
        self._state = State.INIT
        self._reason = ""
        self._written = float("-inf")
        self._streaming_then: set[int] = set()  # sessions
        self._resumed_at = learning.updates
        members = file.read_or_new().members
        self._incarnation = incarnation
        self._lives = {name: (0, member.incarnation) for name, member in members.items()}  # newest session, sessions

    def begin(self, address: str, metrics: str) -> None:
        """Write where the learner can be found from now on; no actor streams to it yet."""
        with contextlib.suppress(OSError), self._file.change() as context:
            context.address, context.metrics = address, metrics
            self._write(context)

    def enter(self, state: State, reason: str = "") -> None:
        """Change to a state and write it."""
        if state is not self._state:
            self._state, self._reason = state, reason
            self.tick(is_due=True)

    def serve(self, is_training: bool) -> None:
        """Enter READY because actors are served, and RUNNING if there was an update."""
        if self._state is State.INIT:
            self.enter(State.READY)
        if is_training:
            self.enter(State.RUNNING)

    def tick(self, is_due: bool = False) -> None:
        """Write the context, if that is due or actors have joined or left."""
        is_other = self._streaming_then != set(self._sessions.open)
        if is_due or is_other or time.monotonic() - self._written >= WRITE_SECONDS:
            with contextlib.suppress(OSError), self._file.change() as context:
                self._write(context)

    def _write(self, context: Context) -> None:
        self._written = time.monotonic()
        context.state, context.reason = self._state, self._reason
        context.counters, context.resumed_at = self._counters(), self._resumed_at
        context.checkpoint = self._newest_checkpoint()
        context.desired_actors = self._desired_actors()
        context.update(LEARNER, pid=os.getpid(), parent=os.getppid(), incarnation=self._incarnation, seen=time.time())
        self._streaming_then = set(self._sessions.open)
        streaming = {_name_of(session): session for session in list(self._sessions.open.values())}
        for name, session in streaming.items():
            context.members[name] = self._streaming(context.members.get(name) or Member("actor", name), session)
        self._note_gone(context, streaming)

    def _counters(self) -> dict[str, int]:
        counted = self._progress() or self._serving
        return {
            "env_steps": counted.env_steps,
            "updates": self._learning.updates,
            "episodes": counted.episodes,
        }

    def _streaming(self, before: Member, session: Session) -> Member:
        newest, lives = self._lives.get(before.name, (0, 0))
        if session.id != newest:
            self._lives[before.name] = (session.id, lives + 1)
        return replace(
            before,
            incarnation=self._lives[before.name][1],
            seen=time.time() - (time.monotonic() - session.traffic.heard),
            streams_to=LEARNER,
            slots=len(session.lease.slots),
        )

    def _note_gone(self, context: Context, streaming: dict[str, Session]) -> None:
        for name, member in context.members.items():
            if name not in streaming and member.streams_to:
                context.update(name, streams_to="")
        strangers = [each for each in context.members.values() if not each.streams_to and not each.pid]
        for member in sorted(strangers, key=lambda each: each.seen)[: max(0, len(strangers) - GONE_KEPT)]:
            del context.members[member.name]
            self._lives.pop(member.name, None)


def _name_of(session: Session) -> str:
    """Return the name of an actor. It may choose any, but that of the learner is taken."""
    return session.name if session.name != LEARNER else f"{LEARNER} (an actor)"
