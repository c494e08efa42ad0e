"""The serving half of a process, put together: sessions, batches, the server. Knows nothing of training.

`seedrl learner` trains on what it records; `seedrl eval` and `seedrl serve` have it alone.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from seedrl.actions import Actions
from seedrl.config import LearnerConfig
from seedrl.device import is_accelerator, serving_stream
from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.serving.balance import Balance
from seedrl.serving.batch_loop import BatchLoop, Pauses
from seedrl.serving.batcher import Batcher
from seedrl.serving.buckets import sizes_of_run
from seedrl.serving.inference import Inference
from seedrl.serving.league import League
from seedrl.serving.protocol import SessionProtocol
from seedrl.serving.seats import Seat
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.serving.slots import FinishedEpisodes, Slots
from seedrl.sizes import group_size
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
        plan: Sequence[Seat],
        job_seed: Callable[[int], int],
        on_failure: Callable[[BaseException], None],
        say: Callable[[str], None],
        describe: Callable[[], Status],
        check_spec: Callable[[EnvSpec], None] = lambda spec: None,
        on_member: Callable[[Session, bool], None] = lambda session, has_joined: None,
    ) -> None:
        """`plan` has the seat of each environment of an actor."""
        serving = config.serving
        self.config = config
        self._metrics = metrics
        self._pauses = Pauses()
        self._inference: Inference | None = None
        self._done: Future[None] | None = None
        self.batcher: Batcher[Request] = Batcher(
            serving.max_rows, serving.min_rows, serving.max_wait, on_submit=self._pauses.end
        )
        self.sessions = SessionTable(config, job_seed, plan, check_spec, on_leave=self._release)
        self.balance = Balance(self.sessions)
        self.protocol = SessionProtocol(config, self.sessions, self.balance, self.batcher, metrics, say, on_member)
        self.server = Server(config, self.protocol, self.balance, metrics, on_failure, say, describe)

    def build(
        self,
        policy: Policy,
        actions: Actions,
        store: Store,
        *,
        core_size: int,
        generator: torch.Generator,
        device: torch.device,
        may_continue: Callable[[], bool] = lambda: True,
        on_episodes: Callable[[FinishedEpisodes], None] = lambda episodes: None,
        on_evaluated: Callable[[FinishedEpisodes], None] = lambda episodes: None,
        fraction: Callable[[], float] = lambda: 0.0,
        league: League | None = None,
    ) -> None:
        """`fraction` is how much of the run is over; `league` is needed if there are seats of opponents."""
        config, self._device = self.config, device
        sizes, graphs = self._sizes(store), config.serving.graphs
        self._inference = Inference(
            policy,
            actions,
            Slots(config.serving.max_slots, actions, config.env.frame_stack, core_size, device),
            self.sessions.seats,
            store,
            self._metrics,
            generator=generator,
            device=device,
            answer=self.protocol.answer,
            on_episodes=on_episodes,
            on_evaluated=on_evaluated,
            fraction=fraction,
            league=league,
            sizes=sizes,
            graphs=len(sizes) > 0 and (device.type == "cuda" if graphs is None else graphs),
        )
        self.batches = BatchLoop(self.batcher, self._inference, self._metrics, self._pauses, may_continue)

    def _sizes(self, store: Store) -> Sequence[int]:
        """Return the sizes of batches on an accelerator that has the store, too; elsewhere they are not padded."""
        if not is_accelerator(self._device) or not store.columns.are_on_device:
            return ()
        return sizes_of_run(self.config)

    def begin(self, on_ready: Callable[[], None]) -> None:
        """Run batches from now on; the server thread calls `on_ready` when the first one may come."""
        self._done = self.server.run(self._serve(on_ready))

    def wake(self) -> None:
        """Look again whether a batch may run: entries of the store are free, or a policy is published. Any thread."""
        self._pauses.wake()

    def agree(self, spec: EnvSpec) -> None:
        """Adopt the spaces of another rank, unless actors have announced some here; wait until that is known."""
        self.server.run(self._agree(spec)).result()

    async def _agree(self, spec: EnvSpec) -> None:
        """Runs in the server thread, which owns the sessions."""
        if not self.sessions.spec.done():
            self.sessions.agree(spec)

    @property
    def has_begun(self) -> bool:
        return self._done is not None

    def pause(self) -> None:
        """Run no further batch; `wait` returns when the last one is over."""
        self.batches.stop()

    def wait(self, seconds: float) -> bool:
        """Return whether the last batch is over in time."""
        try:
            assert self._done is not None
            self._done.result(seconds)
        except TimeoutError:
            return False
        return True

    # Both run in the server thread.

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        assert self._inference is not None
        torch.set_flush_denormal(True)  # of this thread, as in the learner's
        with serving_stream(self._device):
            self._inference.warm_up(min(group_size(self.config), self.config.serving.max_rows))
            on_ready()
            await self.batches.run()

    def _release(self, session: Session) -> None:
        """Drop what an ended session has recorded, if there is anything yet."""
        if self._inference is not None:
            self._inference.release(session)
