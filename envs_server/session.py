"""One session of an actor: the life of one stream, from Hello to its end.

Two threads. gRPC's own consumer thread runs `_outgoing`: it waits for the pool and sends observations. The main thread
waits for the learner and sends actions to the pool. Groups of environments circulate between the two. A third, the
watchdog, ends a session in which nothing moves.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from envs_server.first_rows import FirstRows
from envs_server.groups import SteppingGroups
from envs_server.measurements import Measurements
from envs_server.pool import Pool
from envs_server.sharing import MemoryWriter
from envs_server.watchdog import Watchdog
from seedrl.config import ActorConfig
from seedrl.errors import ConfigError, EnvFailed, InvalidMessage, Refused
from seedrl.metrics import ActorMetrics
from seedrl.specs import rows_of
from seedrl.tracebacks import failed
from seedrl.wire import codec
from seedrl.wire.channel import Link, open_stream
from seedrl.wire.codes import is_worth_retrying
from seedrl.wire.messages import Act, ActorMessage, Command, Control, Hello, Memory, Ready, Welcome

REPORT_SECONDS = 2.0
MOVE_SECONDS = 5.0  # for both ends of the stream to end when the actor is redirected
REDIRECTED_WELCOME_SECONDS = 10.0  # for a learner that the actor was redirected to, until its first answer
OWN_WRAPPERS = "envs_server.wrappers"  # which a learner may always ask for
MakePool = Callable[[Welcome, int], Pool]


class Ending(Enum):
    """The ways in which a session ends."""

    over = "training is over"
    again = "the learner asked to join again"
    redirected = "the learner asked to join elsewhere"
    lost = "the stream broke"
    superseded = "another session with the same instance is newer"
    env_failed = "the environments failed"


class InFlight(NamedTuple):
    """A request that waits for its answer."""

    env_id: NDArray[np.int32]
    buffer: int  # of the shared memory; 0 for none
    sent: float


class ActorSession:
    """The life of one stream, seen from the actor. Owned by the main thread, except `cancel` and `_outgoing`."""

    def __init__(
        self,
        config: ActorConfig,
        link: Link,
        hello: Hello,
        make_pool: MakePool,
        metrics: ActorMetrics,
        *,
        is_home: bool = True,
    ) -> None:
        """`is_home` says that the learner is the one the actor was started with; others get less time to answer."""
        self._config = config
        self._link = link
        self._hello = hello
        self._make_pool = make_pool
        self._call: grpc.Call | None = None
        self._leaving = threading.Event()
        self._pending: dict[int, InFlight] = {}  # by request id
        self._failure: Exception | None = None  # of the outgoing thread
        self._first: FirstRows | None = None  # once there is a pool
        self._groups = SteppingGroups(self._leaving)
        self._memory = MemoryWriter()
        self._measurements = Measurements(metrics)
        deadline = config.step_deadline
        self._watchdog = Watchdog(
            deadline,
            deadline if is_home else min(deadline, REDIRECTED_WELCOME_SECONDS),
            has_requests=lambda: bool(self._pending),
            cancel=self.cancel,
        )
        self.redirected_to = ""  # the address, if that is how it ended
        self.welcomed = False
        self.answered = False  # at least one Step

    @property
    def has_stepped(self) -> bool:
        """Return whether the environments have had their first steps."""
        return self._first is not None and self._first.are_over

    @property
    def is_overdue(self) -> bool:
        """Return whether the environments did not answer in time, as may happen on a busy machine."""
        return self._watchdog.failure is not None

    def cancel(self) -> None:
        """End the session. Any thread may call it."""
        self._leaving.set()
        if self._call is not None:
            self._call.cancel()

    def run(self, stopping: threading.Event) -> tuple[Ending, str]:
        """Stream until the learner ends the session or the stream breaks. Raises what another try cannot mend."""
        channel = self._link.open()
        try:
            call = open_stream(channel, self._outgoing(), self._link.metadata())
            self._call = call
            self._watchdog.start(self._leaving)
            return self._follow(call)
        except grpc.RpcError as error:
            if stopping.is_set():
                return Ending.over, "stopped"
            if (failure := self._failed()) is not None:
                raise failure from error
            return self._judge(error)
        finally:
            self.cancel()
            channel.close()
            self._groups.leave()
            self._watchdog.ended()

    def _failed(self) -> Exception | None:
        """Return the failure of the environments; the watchdog's view comes first."""
        return self._watchdog.failure or self._failure

    def _follow(self, call: Any) -> tuple[Ending, str]:
        """Handle the learner's messages, in order, in the main thread."""
        for data in call:
            now = time.monotonic()
            self._watchdog.moved(now)
            message = codec.parse_response(data)
            if isinstance(message, Act):
                self._act(message, now)
            elif isinstance(message, Welcome):
                self._start_pool(message)
            elif isinstance(message, Memory):
                self._memory.open(message)
            elif isinstance(message, Control) and (ending := self._obey(message)) is not None:
                if ending[0] is Ending.redirected:
                    self._end_both_halves(call)
                return ending
        if (failure := self._failed()) is not None:
            raise failure
        return Ending.lost, "the learner closed the stream"

    def _end_both_halves(self, call: Any) -> None:
        """Send nothing more, and wait until the learner has read and counted everything that was sent."""
        self._leaving.set()
        self._groups.wake()
        limit = threading.Timer(MOVE_SECONDS, call.cancel)
        limit.daemon = True
        limit.start()
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        limit.cancel()

    def _start_pool(self, welcome: Welcome) -> None:
        metrics = self._measurements.metrics
        metrics.actor_sessions += 1
        metrics.actor_connected = 1
        self.welcomed = True
        self._expect_allowed(welcome)
        self._watchdog.welcomed(welcome.num_envs, welcome.players)
        try:
            pool = self._make_pool(welcome, self._config.threads)
        except Exception as error:
            raise failed(EnvFailed, "the environments could not be made", error) from error
        self._first = FirstRows(pool.spec, welcome.num_envs)
        self._watchdog.built()
        self._groups.built(pool, welcome.num_envs // welcome.group_size)

    def _expect_allowed(self, welcome: Welcome) -> None:
        """Refuse modules that the actor's owner has not named: a learner may not run other code here."""
        for module in welcome.modules:
            if module not in (OWN_WRAPPERS, *self._config.modules):
                raise ConfigError(
                    f"the learner asks for {module}, which this actor may not import; allow it with "
                    f"modules=[{','.join([*self._config.modules, module])}]"
                )

    def _act(self, act: Act, now: float) -> None:
        pool = self._groups.pool
        if pool is None:
            raise InvalidMessage("message: expected no act before there is a pool, saw one")
        steps = [self._pending.pop(request_id, None) for request_id in act.request_id]
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            raise InvalidMessage(f"request_id: expected requests in flight, saw {act.request_id[:8]}")
        action = codec.decode_act(act, pool.spec, sum(len(step.env_id) for step in known))
        at = 0
        for env_id, buffer, sent in known:
            self._measurements.metrics.actor_round_trip_seconds.observe(now - sent)
            self._memory.free(buffer)
            self._watchdog.sent(env_id)
            self._groups.send(rows_of(action, at, len(env_id)), env_id)
            self.answered = True
            at += len(env_id)

    def _obey(self, control: Control) -> tuple[Ending, str] | None:
        """Return how the session ends; None if it continues, perhaps with a pause."""
        command, reason = control.command, control.reason
        if command in (Command.PAUSE, Command.RESUME):
            self._groups.pause(command is Command.PAUSE)
            self._watchdog.paused(command is Command.PAUSE)
            return None
        if command is Command.END:
            return Ending.over, reason
        if command is Command.REDIRECT:
            self.redirected_to = control.address
            return Ending.redirected, f"goes to {self.redirected_to}, the learner says: {reason}"
        return Ending.again if command is Command.RESET else Ending.lost, f"the learner says: {reason}"

    def _outgoing(self) -> Iterator[ActorMessage]:
        """Yield the actor's messages, in order, in gRPC's consumer thread."""
        yield self._hello
        pool = self._groups.wait_for_pool()
        if pool is None:
            return
        yield Ready(pool.spec)
        try:
            yield from self._steps(pool)
        except Exception as error:
            self._failure = self._failure or failed(EnvFailed, "the environment raised", error)
            self.cancel()
        finally:
            pool.close()

    def _steps(self, pool: Pool) -> Iterator[ActorMessage]:
        assert self._first is not None
        request_id, metrics = 0, self._measurements.metrics
        now = reported = time.monotonic()
        while self._groups.wait_for_group():
            began = time.monotonic()
            metrics.actor_wait_seconds += began - now
            rows = self._groups.recv()
            if rows is None:
                break
            now = time.monotonic()
            metrics.actor_env_seconds += now - began
            self._first.check(rows)
            self._watchdog.received(rows.env_id)
            request_id += 1
            buffer = self._memory.put(rows, pool.spec)
            self._pending[request_id] = InFlight(rows.env_id, buffer, now)
            metrics.actor_requests["memory" if buffer else "message"] += 1
            metrics.actor_steps += len(rows.env_id)
            self._watchdog.moved(now)
            yield codec.encode_step(request_id, rows, buffer)
            if now - reported > REPORT_SECONDS:
                reported = now
                yield self._measurements.report()
        if self.redirected_to:  # the learner reads to the end
            yield self._measurements.report()

    def _judge(self, error: grpc.RpcError) -> tuple[Ending, str]:
        code, details = error.code(), self._watchdog.stuck or error.details()
        if self._groups.pool is None:  # it was never welcome
            self._link.check(code, details)
        if code is grpc.StatusCode.ABORTED:
            return Ending.superseded, f"the learner at {self._link.address} ended the session: {details}"
        if is_worth_retrying(code):
            return Ending.lost, f"no stream to {self._link.address} ({code.name.lower()}: {details})"
        if self.answered:  # it was welcome until the environments sent something that was not
            raise EnvFailed(f"the learner refused what the environments sent ({code.name}): {details}") from error
        raise Refused(f"the learner at {self._link.address} refused this actor ({code.name}): {details}") from error
