"""The serving half of a process, put together: sessions, batches, the server. Knows nothing of training.

`seedrl learner` trains on what it records; `seedrl eval` and `seedrl serve` have it alone.
"""

from collections.abc import Callable
from concurrent.futures import Future

import torch

from seedrl.actions import Actions
from seedrl.config import LearnerConfig, group_size
from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.serving.balance import Balance
from seedrl.serving.batch_loop import BatchLoop
from seedrl.serving.batcher import Batcher
from seedrl.serving.inference import Inference
from seedrl.serving.protocol import SessionProtocol
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.serving.slots import FinishedEpisodes, Slots
from seedrl.specs import EnvSpec
from seedrl.status import Status
from seedrl.store import Store


class InferenceService:
    """Owned by the main thread. `build` follows as soon as the spaces are known, then `begin`, at last `pause`."""

    def __init__(
        self,
        config: LearnerConfig,
        metrics: ServingMetrics,
        *,
        job_seed: Callable[[int], int],
        on_failure: Callable[[BaseException], None],
        say: Callable[[str], None],
        describe: Callable[[], Status],
        check_spec: Callable[[EnvSpec], None] = lambda spec: None,
        evaluates_all: bool = False,
    ) -> None:
        serving = config.serving
        self._config = config
        self._metrics = metrics
        self.batcher: Batcher[Request] = Batcher(serving.max_rows, serving.min_rows, serving.max_wait)
        self.sessions = SessionTable(config, job_seed, check_spec, self._release, evaluates_all=evaluates_all)
        self.balance = Balance(self.sessions)
        self.protocol = SessionProtocol(config, self.sessions, self.balance, self.batcher, metrics, say)
        self.server = Server(config, self.protocol, self.balance, metrics, on_failure, say, describe)
        self._built: Inference | None = None
        self._done: Future[None] | None = None

    def build(
        self,
        policy: Policy,
        actions: Actions,
        store: Store,
        *,
        core_size: int,
        generator: torch.Generator,
        device: torch.device,
        may_go_on: Callable[[], bool] = lambda: True,
        greedy: bool = True,
        on_evaluated: Callable[[FinishedEpisodes], None] = lambda episodes: None,
    ) -> None:
        config = self._config
        self.inference = Inference(
            policy,
            actions,
            Slots(config.serving.max_slots, actions, config.env.frame_stack, core_size, device),
            store,
            self._metrics,
            generator=generator,
            device=device,
            answer=self.protocol.answer,
            greedy=greedy,
            on_evaluated=on_evaluated,
        )
        self.batches = BatchLoop(self.batcher, self.inference, self._metrics, may_go_on)
        store.on_free = self.batches.wake
        self._built = self.inference

    def _release(self, session: Session) -> None:
        """Free what inference holds for a session that has ended. Runs in the server thread."""
        if self._built is not None:
            self._built.release(session)

    def begin(self, on_ready: Callable[[], None]) -> None:
        """Batches run from now on; `on_ready` is called, by the server thread, when the first one may come."""
        self._done = self.server.run(self._serve(on_ready))

    def agree(self, spec: EnvSpec) -> None:
        """Spaces that another rank has been told, unless actors have told them here; waits until that is known."""
        self.server.run(self._agree(spec)).result()

    async def _agree(self, spec: EnvSpec) -> None:
        """Runs in the server thread, whose sessions are."""
        if not self.sessions.spec.done():
            self.sessions.agree(spec)

    @property
    def has_begun(self) -> bool:
        return self._done is not None

    def pause(self) -> None:
        """No further batch; `wait` says when the last one is over."""
        self.batches.stop()

    def wait(self, seconds: float) -> bool:
        """Whether the last batch is over in time."""
        try:
            assert self._done is not None
            self._done.result(seconds)
        except TimeoutError:
            return False
        return True

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        """Runs in the server thread."""
        torch.set_flush_denormal(True)  # of this thread, as in the learner's
        self.inference.warm_up(min(group_size(self._config), self._config.serving.max_rows))
        on_ready()
        await self.batches.run()
