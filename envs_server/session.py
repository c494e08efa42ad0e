"""One session of an actor: the life of one stream, from Hello to its end.

Two threads. gRPC's own consumer thread runs `_outgoing`: it waits for the pool and sends observations. The main thread
waits for the learner and sends actions to the pool. Groups of environments circulate between the two. A third, the
watchdog, ends a session in which nothing moves.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from envs_server.pool import Pool, abandon
from seedrl.config import ActorConfig
from seedrl.errors import ConfigError, EnvFailed, InvalidMessage, Refused, SeedrlError
from seedrl.metrics import ActorMetrics
from seedrl.rows import Rows
from seedrl.specs import Arrays, EnvSpec, leaves, rows_of
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.channel import Link, open_stream
from seedrl.wire.framing import StepParts
from seedrl.wire.memory import Memory, SharedBuffers, open_buffers
from seedrl.wire.status import is_worth_retrying

REPORT_SECONDS = 2.0
PAUSE_SECONDS = 0.1  # between looks whether a pause is over
RETURN_SECONDS = 1.0  # for the environments to give back the thread that waits for them
MAKE_SECONDS = 120.0  # to make environments; the learner waits no longer
MOVE_SECONDS = 5.0  # for both ends of the stream to end, if the session goes on elsewhere
STRANGE_SECONDS = 10.0  # for a learner that we were sent to to say its first word
ABANDON_SECONDS = 5.0  # for environments to give back the main thread once their session is over
NOT_STEPPING = np.iinfo(np.int64).max
MakePool = Callable[[codec.Welcome, int], Pool]


class Ending(Enum):
    """How a session ended."""

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


def measured(metrics: ActorMetrics) -> codec.Report:
    """What a report is made of, since the actor started."""
    trips = metrics.actor_round_trip_seconds
    return codec.Report(
        steps=metrics.actor_steps,
        env_seconds=metrics.actor_env_seconds,
        wait_seconds=metrics.actor_wait_seconds,
        requests=trips.count,
        round_trip_seconds=trips.sum,
        cpu_seconds=time.process_time(),
        reconnects=metrics.actor_sessions,
    )


class ActorSession:
    """The life of one stream, seen from the actor."""

    def __init__(
        self,
        config: ActorConfig,
        link: Link,
        greeting: codec.Hello,
        make_pool: MakePool,
        metrics: ActorMetrics,
        *,
        is_home: bool = True,
    ) -> None:
        """`is_home` is the learner that the actor was started with; to others it gives less time."""
        self._config = config
        self._link = link
        self._greeting = greeting
        self._make_pool = make_pool
        self._channel = link.open()
        self._pool: Pool | None = None
        self._pool_ready = threading.Event()
        self._paused = False  # the learner has asked for no further Step
        self._leaving = threading.Event()
        self._stepping = threading.Semaphore(0)  # groups the pool is stepping
        self._in_pool = threading.Lock()  # held while a thread waits inside the environments' own code
        self._pending: dict[int, InFlight] = {}  # by request id
        self._memory: SharedBuffers | None = None
        self._free_buffers: deque[int] = deque()
        self._failure: Exception | None = None  # of the outgoing thread
        self._progress = time.monotonic()
        self._building = False
        self._looks = 0  # of the watchdog
        self._stepping_since = np.zeros(0, np.int64)  # [num_envs]  a look, or NOT_STEPPING
        self._stuck = ""  # what the watchdog saw
        self._ended = threading.Event()
        self._call: grpc.Call | None = None
        self._first_word_seconds = config.step_deadline if is_home else min(config.step_deadline, STRANGE_SECONDS)
        self.redirected_to = ""  # the address, if that is how it ended
        self.welcomed = False
        self.answered = False  # at least one Step
        self._metrics = metrics
        self._before = measured(metrics)  # when the session began

    def cancel(self) -> None:
        self._leaving.set()
        if self._call is not None:
            self._call.cancel()

    def run(self, stopping: threading.Event) -> tuple[Ending, str]:
        """Streams until told to leave or until the stream breaks. Raises what cannot be mended by trying again."""
        watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        try:
            call = open_stream(self._channel, self._outgoing(), self._link.metadata())
            self._call = call
            watchdog.start()
            return self._follow(call)
        except grpc.RpcError as error:
            if stopping.is_set():
                return Ending.over, "stopped"
            if self._failure is not None:
                raise self._failure from error
            return self._judge(error)
        finally:
            self._leaving.set()
            if self._call is not None:
                self._call.cancel()
            self._channel.close()
            self._leave_pool()
            self._ended.set()

    def _leave_pool(self) -> None:
        """Waits until nobody is in there: a thread that comes back from C++ while Python ends aborts the process."""
        if self._in_pool.acquire(timeout=RETURN_SECONDS):
            self._in_pool.release()
        elif self._pool is not None:
            abandon(self._pool)

    def _follow(self, call: Any) -> tuple[Ending, str]:
        """The main thread of a session: what the learner says, in order."""
        for response in call:
            self._progress = time.monotonic()
            kind = response.WhichOneof("message")
            if kind == "act":
                self._act(response.act)
            elif kind == "welcome":
                self._start_pool(codec.decode_welcome(response.welcome))
            elif kind == "memory":
                self._share(codec.decode_memory(response.memory))
            elif kind == "control" and (ending := self._obey(response.control)) is not None:
                if ending[0] is Ending.redirected:
                    self._end_both_halves(call)
                return ending
        if self._failure is not None:
            raise self._failure
        return Ending.lost, "the learner closed the stream"

    def _end_both_halves(self, call: Any) -> None:
        """Sends nothing more and waits until the learner has read, and counted, all that was sent."""
        self._leaving.set()
        self._stepping.release()  # so that the outgoing thread notices
        limit = threading.Timer(MOVE_SECONDS, call.cancel)
        limit.daemon = True
        limit.start()
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        limit.cancel()

    def _start_pool(self, job: codec.Welcome) -> None:
        self._metrics.actor_sessions += 1
        self._metrics.actor_connected = 1
        self.welcomed = True
        self._stepping_since = np.full(job.num_envs, NOT_STEPPING, np.int64)
        self._expect_allowed(job)
        self._building = True
        try:
            self._pool = self._make_pool(job, self._config.threads)
        except SeedrlError:
            raise
        except Exception as error:
            raise EnvFailed(f"the environments could not be made: {error!r}") from error
        self._progress = time.monotonic()
        self._building = False
        self._stepping_since[:] = self._looks
        for _ in range(job.num_envs // job.group_size):
            self._stepping.release()
        self._pool_ready.set()

    def _expect_allowed(self, job: codec.Welcome) -> None:
        """A learner may have an actor run what the actor's owner has named, and nothing else."""
        for module in job.modules:
            if module not in self._config.modules:
                raise ConfigError(
                    f"the learner asks for {module}, which this actor may not import; allow it with "
                    f"modules=[{','.join([*self._config.modules, module])}]"
                )

    def _act(self, act: pb.Act) -> None:
        if self._pool is None:
            raise InvalidMessage("message: expected no act before there is a pool, saw one")
        steps = [self._pending.pop(request_id, None) for request_id in act.request_id]
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            raise InvalidMessage(f"request_id: expected some in flight, saw {list(act.request_id)[:8]}")
        action = codec.decode_act(act, self._pool.spec, sum(len(step.env_id) for step in known))
        at = 0
        for env_id, buffer, sent in known:
            self._metrics.actor_round_trip_seconds.observe(self._progress - sent)
            if buffer:
                self._free_buffers.append(buffer)
            self._send(self._pool, rows_of(action, at, len(env_id)), env_id)
            at += len(env_id)

    def _send(self, pool: Pool, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self._stepping_since[env_id] = self._looks
        try:
            pool.send(action, env_id)
        except Exception as error:
            raise EnvFailed(f"the environment raised: {error!r}") from error
        self.answered = True
        self._stepping.release()

    def _share(self, offer: Memory) -> None:
        """From now on observations go into the learner's memory; if it cannot be reached, they go on in messages."""
        with contextlib.suppress(OSError):
            memory = open_buffers(offer)
            self._free_buffers.extend(range(1, memory.count + 1))
            self._memory = memory

    def _obey(self, control: pb.Control) -> tuple[Ending, str] | None:
        """How the session ends; None if it goes on, with a pause perhaps."""
        if control.command in (pb.Control.COMMAND_PAUSE, pb.Control.COMMAND_RESUME):
            self._paused = control.command == pb.Control.COMMAND_PAUSE
            stepping = self._stepping_since != NOT_STEPPING
            self._stepping_since[stepping] = self._looks  # a pause is nobody's fault
            return None
        if control.command == pb.Control.COMMAND_END:
            return Ending.over, control.reason
        if control.command == pb.Control.COMMAND_REDIRECT:
            self.redirected_to = codec.decode_redirect(control)
            return Ending.redirected, f"goes to {self.redirected_to}, the learner says: {control.reason}"
        ending = Ending.again if control.command == pb.Control.COMMAND_RESET else Ending.lost
        return ending, f"the learner says: {control.reason}"

    def _outgoing(self) -> Iterator[pb.StreamRequest | StepParts]:
        """What the actor says, in order; runs in gRPC's consumer thread."""
        yield codec.encode_hello(self._greeting)
        if not self._wait(self._pool_ready):
            return
        assert self._pool is not None
        yield codec.encode_ready(self._pool.spec)
        try:
            yield from self._steps(self._pool)
        except Exception as error:
            failure = error if isinstance(error, SeedrlError) else EnvFailed(f"the environment raised: {error!r}")
            self._failure = self._failure or failure
            self.cancel()
        finally:
            self._pool.close()

    def _steps(self, pool: Pool) -> Iterator[pb.StreamRequest | StepParts]:
        request_id, metrics = 0, self._metrics
        reported = time.monotonic()
        now = reported
        while self._wait_for_group():
            began = time.monotonic()
            metrics.actor_wait_seconds += began - now
            with self._in_pool:
                if self._leaving.is_set():
                    break
                rows = pool.recv()
            now = time.monotonic()
            metrics.actor_env_seconds += now - began
            self._stepping_since[rows.env_id] = NOT_STEPPING
            request_id += 1
            buffer = self._put_into_memory(rows, pool.spec)
            self._pending[request_id] = InFlight(rows.env_id, buffer, now)
            metrics.actor_requests["memory" if buffer else "message"] += 1
            metrics.actor_steps += len(rows.env_id)
            self._progress = now
            yield codec.encode_step(request_id, rows, buffer)
            if now - reported > REPORT_SECONDS:
                reported = now
                yield codec.encode_report(self._report())
        if self.redirected_to:  # the learner reads to the end
            yield codec.encode_report(self._report())

    def _report(self) -> codec.Report:
        """What was measured since the session began."""
        before = self._before
        return measured(self._metrics).since(before)._replace(reconnects=before.reconnects)

    def _put_into_memory(self, rows: Rows, spec: EnvSpec) -> int:
        """The shared buffer that the observations are in now; 0 if there is none for them."""
        memory = self._memory
        if memory is None or not self._free_buffers:
            return 0
        size = codec.shared_bytes(spec, len(rows.env_id))
        if size > memory.buffer_bytes:
            return 0
        buffer = self._free_buffers.popleft()
        places = codec.shared_leaves(memory.bytes(buffer, size), spec, len(rows.env_id))
        for place, leaf in zip(places, leaves(rows.observation), strict=True):
            np.copyto(np.frombuffer(place, leaf.dtype).reshape(leaf.shape), leaf)
        return buffer

    def _wait_for_group(self) -> bool:
        """Waits until the pool is stepping a group; false when the session ends instead."""
        while not self._leaving.is_set():
            if self._paused:
                self._leaving.wait(PAUSE_SECONDS)
            elif self._stepping.acquire(timeout=0.5):
                return True
        return False

    def _wait(self, event: threading.Event) -> bool:
        while not self._leaving.is_set():
            if event.wait(timeout=0.1):
                return True
        return False

    def _watch(self) -> None:
        """Cancels a stream without progress: a wedged learner keeps its port open, and gRPC sees nothing wrong.

        Time is counted in looks, so that a process that was stopped for a while blames nobody.
        """
        pause = min(1.0, self._config.step_deadline / 4)
        silent, progress = 0.0, self._progress
        while not self._leaving.wait(timeout=pause):
            self._looks += 1
            silent = silent + pause if self._progress == progress and not self._paused else 0.0
            progress = self._progress
            if self._building:
                self._failure = self._overdue("the environments could not be made", silent, MAKE_SECONDS)
            elif silent and (self._pending or self._pool is None):  # perhaps the learner is to blame
                if silent >= (self._config.step_deadline if self.welcomed else self._first_word_seconds):
                    self._stuck = f"the learner has not answered for {silent:.0f} s"
            elif not self._paused:
                self._failure = self._failure or self._hanging(pause)
            if self._failure or self._stuck:
                self.cancel()
        if not self._ended.wait(ABANDON_SECONDS) and self._failure:
            # The main thread is lost in the environments' own code. Nothing but the end of the process brings it back.
            print(f"actor: {self._failure}; ending the process", file=sys.stderr, flush=True)
            os._exit(EnvFailed.exit_code)

    def _hanging(self, pause: float) -> EnvFailed | None:
        """Names an environment that does not answer, also while others do."""
        if self._pool is None:
            return None
        env_id = int(self._stepping_since.argmin())
        seconds = max(0.0, (self._looks - int(self._stepping_since[env_id])) * pause)
        return self._overdue(f"environment {env_id} has not answered", seconds, self._config.step_deadline)

    @staticmethod
    def _overdue(what: str, seconds: float, limit: float) -> EnvFailed | None:
        return EnvFailed(f"{what} for {seconds:.0f} s") if seconds >= limit else None

    def _judge(self, error: grpc.RpcError) -> tuple[Ending, str]:
        code, details = error.code(), self._stuck or error.details()
        if self._pool is None:  # it was never welcome
            self._link.check(code, details)
        if code is grpc.StatusCode.ABORTED:
            return Ending.superseded, f"the learner at {self._link.address} ended the session: {details}"
        if is_worth_retrying(code):
            return Ending.lost, f"no stream to {self._link.address} ({code.name.lower()}: {details})"
        if self.answered:  # it was welcome until the environments sent something that was not
            raise EnvFailed(f"the learner refused what the environments sent ({code.name}): {details}") from error
        raise Refused(f"the learner at {self._link.address} refused this actor ({code.name}): {details}") from error
