"""HOW a batch runs: stage, step the policy, answer, record. Knows nothing of gRPC or of training.

`staging` moves the rows to the device, `policy_step` is what happens to them there, `unroll_writer` and `tally` keep
the books of the host.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.bank import CURRENT
from seedrl.columns import Record
from seedrl.device import Download, is_accelerator
from seedrl.metrics import ServingMetrics, Stopwatch
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.league import League
from seedrl.serving.mixture import forward_each
from seedrl.serving.policy_step import Forward, Kind, PolicyStep, run_model
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import FinishedEpisodes, Indices, Slots, WritePosition
from seedrl.serving.staging import HostBatch, Noise, Stager, join
from seedrl.serving.tally import Tally
from seedrl.serving.unroll_writer import UnrollWriter
from seedrl.specs import Arrays, rows_of
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput

Answer = tuple[Request, Arrays]  # its actions


class Inference:
    """Owned by the server thread. `finish_unrolls` has to be true before `run`; `release` follows every session."""

    def __init__(
        self,
        policy: Policy,
        actions: Actions,
        slots: Slots,
        seats: Seats,
        store: Store,
        metrics: ServingMetrics,
        *,
        generator: torch.Generator,
        device: torch.device,
        answer: Callable[[list[Answer]], None],
        on_episodes: Callable[[FinishedEpisodes], None] = lambda episodes: None,
        on_evaluated: Callable[[FinishedEpisodes], None] = lambda episodes: None,
        fraction: Callable[[], float] = lambda: 0.0,
        league: League | None = None,
    ) -> None:
        """`on_episodes` is called with episodes that end in seats that are trained on, `on_evaluated` with others.

        `fraction` is how much of the run is over, for schedules of exploration.
        """
        self._policy = policy
        self._league = league  # if some seats are those of opponents
        self._actions = actions
        self._slots = slots
        self._seats = seats
        self._metrics = metrics
        self._noise = Noise(actions, generator)
        self._stager = Stager(store.columns, seats, device)
        self._step = PolicyStep(actions, slots, store.columns)
        self._writer = UnrollWriter(slots, seats, store, metrics)
        self._tally = Tally(slots, seats, metrics, league, on_episodes, on_evaluated)
        self._download = Download(device)
        self._is_accelerator = is_accelerator(device)
        self._answer = answer
        self._fraction = fraction

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run a forward pass without a request: in the first one libraries choose and allocate. Records nothing."""
        first = np.zeros(rows, np.int64)
        nothing = HostBatch(first, np.zeros(rows, np.float32), np.zeros(rows, np.uint8))
        position, last_action = WritePosition(first, first, first), self._slots.last_action(first)
        staged = self._stager.stage(nothing, nothing.flags != 0, position, last_action)
        inputs = ModelInput(self._stager.stacks(staged.at), staged.reward, staged.last_action, staged.reset)
        core_state = torch.zeros_like(self._slots.core_state(staged.slots))
        with self._policy.read() as (model, _):
            run_model(model, inputs.tree_map(torch.zeros_like), core_state)

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        """Answers every request and records its rows."""
        timer = Stopwatch(self._metrics.serving_seconds)
        batch = join(requests)
        reset = (batch.flags & RESET) != 0
        resets = batch.slots[reset]
        if len(resets):
            for request in requests:  # a new session takes its slots over with the first row of each
                self._writer.claim(request.slots, request.session.id)
        position = self._slots.locate(batch.slots, resets)
        last_action = self._slots.last_action(batch.slots)
        if self._seats.is_moving:
            self._seats.follow(self._fraction())
        staged = self._stager.stage(batch, reset, position, last_action)
        timer.lap("stage")
        observation = self._stager.observe(requests, staged.at)
        timer.lap("copy")
        noise, kind = self._noise.draw(len(batch.slots)), Kind(self._seats.any_explores, self._seats.any_greedy)
        if self._league is not None:
            self._league.begin(resets)
        with self._policy.read() as (model, version):
            forward = self._forward(model, batch.slots)
            computed = self._step.compute(forward, staged, observation, noise, kind)
        self._download.begin(computed.action)
        if self._is_accelerator:  # which works on while the host waits for the actions
            self._step.keep(staged, computed)
        action = self._download.wait()
        timer.lap("forward")
        self._answer(_split(requests, self._actions.to_env(action)))
        self._tally.count_answers(requests, version, timer.lap("reply"))

        if not self._is_accelerator:
            self._step.keep(staged, computed)
        record = Record(batch.reward, batch.flags, position.age, last_action, action, np.array(version))
        self._writer.write(staged.at, batch.slots, position, record)
        self._tally.count(batch, reset)
        timer.lap("record")

    def _forward(self, current: nn.Module, slots: Indices) -> Forward:
        """Return how the policies that act in these slots are run."""
        league = self._league
        if league is None or not self._seats.any_opponents:
            return partial(run_model, current)

        def run(number: int, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
            return run_model(current if number == CURRENT else league.model_of(number), inputs, core_state)

        entry = self._seats.entry[slots]
        return lambda inputs, core_state: forward_each(entry, inputs, core_state, run)

    @torch.inference_mode()
    def finish_unrolls(self) -> bool:
        """Hand complete unrolls over and continue in fresh entries; return false while too few are free."""
        return self._writer.finish_unrolls()

    def release(self, session: Session) -> None:
        """Drop what an ended session has recorded and not handed over; not to be called while `run` runs."""
        self._writer.release(session.lease.slots)


def _split(requests: list[Request], action: Arrays) -> list[Answer]:
    if len(requests) == 1:
        return [(requests[0], action)]
    answers: list[Answer] = []
    at = 0
    for request in requests:
        answers.append((request, rows_of(action, at, request.rows)))
        at += request.rows
    return answers
