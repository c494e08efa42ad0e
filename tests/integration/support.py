"""Parts of the integration tests: learners and actors in threads, hand-made peers, a wire that can be cut."""

import contextlib
import io
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor, nn

from envs_server.actor import Actor
from seedrl.config import LearnerConfig
from seedrl.errors import SeedrlError
from seedrl.roles.learner import LearnerProcess
from seedrl.rows import RESET, Rows
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput
from seedrl.v1 import inference_pb2 as pb
from seedrl.v1 import inference_pb2_grpc
from seedrl.wire import codec
from seedrl.wire.channel import client_options
from seedrl.wire.framing import StepParts, serialize
from tests.builders import one_step
from tests.fakes import FakePool, make_spec
from tests.integration.waiting import DEADLINE, eventually, is_listening

NUM_ACTIONS = 17
SPEC = make_spec(shape=(3,), num_actions=NUM_ACTIONS)


# A policy whose action shows which observation it was made for.


def right_action(observation: Any) -> Any:
    """Return the action that OracleModel takes for observations [..., 3] of environment, row and pool."""
    return (7 * observation[..., 0] + 3 * observation[..., 1] + observation[..., 2]) % NUM_ACTIONS


class OracleModel(nn.Module):
    """Takes `right_action` with certainty; only its value learns. Use as model.name=tests.integration.support:…"""

    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.value = nn.Linear(1, 1)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        signs = inputs.observation.flatten(2)[..., :3].double()
        logits = 1e4 * nn.functional.one_hot(right_action(signs).long(), NUM_ACTIONS).float()
        return ModelOutput(logits, self.value(inputs.reward.unsqueeze(-1)).squeeze(-1)), core_state


class FailingModel(OracleModel):
    """Works for inference and raises on the first train batch."""

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            raise ArithmeticError("this model cannot be trained")
        return super().forward(inputs, core_state)


class IdleLearnerService(LearnerProcess):
    """Never trains, so that the store fills and inference stands still."""

    def _build(self, spec: EnvSpec) -> None:
        super()._build(spec)
        assert self.training is not None
        self.training.loop.run = self._wait_for_stop  # type: ignore[method-assign]

    def _wait_for_stop(self) -> None:
        while not self.stop.wait(0.05):
            pass


class SignedPool(FakePool):
    """Counting environments that sign their observations and check every action that they receive."""

    def __init__(self, job: codec.Welcome, threads: int = 1, shape: tuple[int, ...] = (3,), **options: Any) -> None:
        super().__init__(job, threads, shape=shape, num_actions=NUM_ACTIONS, **options)
        self.job = job
        self.signature = job.seed % 1000
        self.wrong: list[str] = []
        self._shown: dict[int, Any] = {}  # environment → its newest observation

    def recv(self) -> Rows:
        rows = super().recv()
        entries = rows.observation.reshape(len(rows.env_id), -1)
        entries[:, 2] = self.signature
        for env_id, entry in zip(rows.env_id.tolist(), entries[:, :3], strict=True):
            self._shown[env_id] = entry.copy()
        return rows

    def send(self, action: Any, env_id: Any) -> None:
        for env, chosen in zip(env_id.tolist(), action.tolist(), strict=True):
            if chosen != right_action(self._shown[env]):
                self.wrong.append(f"action {chosen} for {self._shown[env].tolist()} of environment {env}")
        super().send(action, env_id)


# The two ends, in threads of the test.


def tiny_config(run_dir: str, listen: str) -> LearnerConfig:
    config = LearnerConfig(run_dir=run_dir, listen=listen, threads=1)
    config.env.id = "Signed-v0"
    config.model.name = f"{__name__}:OracleModel"
    config.algorithm = one_step(unroll_length=4, batch_size=4)
    config.serving.max_slots = 64
    config.actors.envs = 4
    config.stop.env_steps = 10**9
    config.display = type(config.display).none
    return config


class InThread:
    """Calls `run` in a thread of its own and keeps what it returned or raised."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._run = run
        self.thread = threading.Thread(target=self._work, name=f"test-{type(self).__name__}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error

    def ended(self) -> bool:
        return not self.thread.is_alive()

    def join(self, seconds: float = DEADLINE) -> Any:
        """Return what `run` returned or raise what it raised; fail if it does not end."""
        self.wait(seconds)
        if self.error is not None:
            raise self.error
        return self.result

    def wait(self, seconds: float = DEADLINE) -> None:
        """Wait for the end of `run`; raise only errors that no command would report as its own."""
        self.thread.join(seconds)
        assert self.ended(), f"{type(self).__name__} still runs after {seconds:g} s"
        if self.error is not None and not isinstance(self.error, SeedrlError):
            raise self.error


class RunningLearner(InThread):
    """A learner process in a thread. Its output goes to `said`, not to a stream that pytest captures and closes."""

    def __init__(self, config: LearnerConfig, kind: type[LearnerProcess] = LearnerProcess) -> None:
        self._output = io.StringIO()
        with contextlib.redirect_stdout(self._output):  # the learner keeps the stream that it finds when it is made
            self.service = kind(config)
        self.address = config.listen
        super().__init__(self.service.run)

    def opened(self) -> "RunningLearner":
        """Wait until actors can connect, or until the learner has ended."""
        eventually(lambda: self.ended() or is_listening(self.address))
        return self

    @property
    def said(self) -> str:
        return self._output.getvalue()

    @property
    def env_steps(self) -> int:
        return self.service.serving.env_steps

    def steps_on(self, more: int = 50) -> None:
        """Wait until the learner has served `more` steps than now."""
        goal = self.env_steps + more
        eventually(lambda: self.env_steps >= goal)

    def ask_to_stop(self, status: str = "interrupted") -> None:
        self.service.stop.ask(status, "the test is over")

    def stop(self, status: str = "interrupted", seconds: float = DEADLINE) -> dict[str, Any]:
        """Stop the learner and return its summary."""
        self.ask_to_stop(status)
        summary = self.join(seconds)
        assert not self.living_threads()
        return summary

    def living_threads(self) -> list[str]:
        training = self.service.training
        threads = [self.service.inference.server._thread, *([training.thread] if training else [])]
        return [thread.name for thread in threads if thread.is_alive()]


class RunningActor(InThread):
    """An actor in a thread; `pools` holds one pool per session, `said` what the actor printed."""

    def __init__(self, config: Any, make_pool: Callable[..., Any]) -> None:
        self.pools: list[Any] = []
        self.said: list[str] = []

        def remember(job: codec.Welcome, threads: int) -> Any:
            self.pools.append(make_pool(job, threads))
            return self.pools[-1]

        self.actor = Actor(**vars(config), make_pool=remember, say=self.said.append)
        super().__init__(self.actor.run)

    @property
    def requests(self) -> int:
        """Requests answered in the newest session."""
        return len(self.pools[-1].sent) if self.pools else 0

    @property
    def wrong(self) -> list[str]:
        return [wrong for pool in self.pools for wrong in pool.wrong]

    def says(self, words: str) -> bool:
        return any(words in line for line in self.said)

    def ask_to_stop(self) -> None:
        self.actor.stop()

    def stop(self) -> None:
        self.ask_to_stop()
        self.join()


@contextlib.contextmanager
def ended_together() -> Iterator[list[Any]]:
    """A list for running learners and actors: all of them are asked to stop, then waited for, whatever happened."""
    started: list[Any] = []
    try:
        yield started
    finally:
        for each in started:
            each.ask_to_stop()
        errors = [error for each in started if (error := _error_of(each.wait))]
        if errors:
            raise errors[0]


def _error_of(wait: Callable[[], None]) -> Exception | None:
    try:
        wait()
    except Exception as error:
        return error
    return None


class RawActor:
    """The actor's end of a stream, one message at a time, right or wrong."""

    def __init__(self, address: str, channel: grpc.Channel | None = None) -> None:
        self._channel = channel or grpc.insecure_channel(address, options=client_options())
        self._outgoing: queue.Queue[pb.StreamRequest | None] = queue.Queue()
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._call = stub.Stream(iter(self._outgoing.get, None), timeout=DEADLINE, wait_for_ready=True)

    def __enter__(self) -> "RawActor":
        return self

    def __exit__(self, *_: Any) -> None:
        self.cut()

    def send(self, message: pb.StreamRequest | StepParts) -> None:
        """Send a message through the generated code, as a foreign actor would."""
        self._outgoing.put(pb.StreamRequest.FromString(serialize(message)))

    def receive(self) -> pb.StreamResponse:
        return next(self._call)

    def join(self, spec: EnvSpec = SPEC, **greeting: Any) -> codec.Welcome:
        """Exchange Hello, Welcome and Ready; return the Welcome."""
        self.hello(**greeting)
        job = codec.decode_welcome(self.receive().welcome)
        self.send(codec.encode_ready(spec))
        return job

    def hello(self, **greeting: Any) -> None:
        """Send a Hello with these fields; only the name is that of a real actor."""
        self.send(codec.encode_hello(codec.Hello(**{"name": "raw", **greeting})))

    def step(self, request_id: int = 1, **changes: Any) -> None:
        self.send(step_message(request_id, **changes))

    def status(self) -> tuple[grpc.StatusCode, str]:
        """Return how the learner ended the stream; read all messages before that."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass
        return self._call.code(), self._call.details()

    def half_close(self) -> None:
        self._outgoing.put(None)

    def cut(self) -> None:
        """End the stream without a message."""
        self._call.cancel()
        self._channel.close()
        self._outgoing.put(None)


def make_rows(env_id: Any = (0, 1, 2, 3), spec: EnvSpec = SPEC, flags: int = RESET) -> Rows:
    n = len(env_id)
    return Rows(
        env_id=np.array(env_id, np.int32),
        observation=np.zeros((n, *spec.observation.shape), spec.observation.dtype),
        reward=np.zeros(n, np.float32),
        flags=np.full(n, flags, np.uint8),
    )


def step_message(request_id: int = 1, **changes: Any) -> StepParts:
    """Return a valid first Step, except for `changes`, which are fields of Rows."""
    return codec.encode_step(request_id, make_rows()._replace(**changes))


# A learner that follows a script.

Script = Callable[[Iterator[pb.StreamRequest]], Iterator[pb.StreamResponse]]


class ActorLeft(Exception):
    """Ends a script whose actor half-closed its stream."""


@contextlib.contextmanager
def grpc_server(threads: int) -> Iterator[grpc.Server]:
    """A server that is not started yet; afterwards its port is closed and its threads have ended."""
    with futures.ThreadPoolExecutor(threads) as executor:
        server = grpc.server(executor)
        try:
            yield server
        finally:
            assert server.stop(grace=0.2).wait(DEADLINE)


@dataclass
class ScriptedLearner(inference_pb2_grpc.InferenceServiceServicer):
    """A server that answers each session by `script`, which reads requests and yields responses."""

    script: Script
    sessions: int = 0
    address: str = ""
    _until_the_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def Stream(self, requests: Iterator[pb.StreamRequest], context: grpc.ServicerContext) -> Iterator[Any]:
        self.sessions += 1
        with contextlib.suppress(grpc.RpcError, ActorLeft):
            yield from self.script(requests)

    def __enter__(self) -> "ScriptedLearner":
        server = self._until_the_end.enter_context(grpc_server(threads=8))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._until_the_end.close()


# A wire that can be cut.


class Wire:
    """Passes bytes between actors and a learner until `cut`; new connections work again."""

    def __init__(self, target: str, delay: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self._delay = delay  # seconds, of everything that passes
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted: list[float] = []  # the time of each connection
        self._open: list[socket.socket] = []  # the actor's end, the learner's, the next actor's …
        self._half_open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE)  # that accepts, so there are no further connections
        self._listener.close()
        self.cut()
        for end in self._half_open:
            end.close()
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), f"a connection of the wire is open after {DEADLINE:g} s"

    def cut_unnoticed(self) -> None:
        """End every connection as actors see it; for the learner they stay open and silent."""
        self._half_open += [far.dup() for far in self._open[1::2]]
        self._open = self._open[::2]
        self.cut()

    def cut(self) -> None:
        """End every connection at once, without the GOAWAY of HTTP/2."""
        ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="wire", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                self.accepted.append(time.monotonic())
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self._target)
            except ConnectionRefusedError:
                near.close()
                continue
            self._open += [near, far]
            self._start(self._pass, near, far)

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    content = source.recv(65536)
                    if not content:
                        return
                    time.sleep(self._delay)
                    (far if source is near else near).sendall(content)


def expect_refusal(raw: RawActor, code: grpc.StatusCode, words: list[str]) -> None:
    """Check the status with which the learner ended a stream, and that its details contain all of `words`."""
    seen, details = raw.status()
    assert seen is code
    assert [word for word in words if word not in details] == [], details


def fill(path: Path) -> None:
    """Write a file that takes all the room its disk has."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
