"""WHICH policies act in a batch: the current one, and entries of the bank in the seats of opponents.

Chooses between a recorded program and launched kernels. Knows nothing of requests, sessions or unrolls.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedrl.bank import CURRENT
from seedrl.device import is_accelerator
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.graphs import Eager, Graphs, Program
from seedrl.serving.league import League
from seedrl.serving.mixture import forward_each
from seedrl.serving.policy_step import Forward, Inputs, Kind, PolicyStep, run_model
from seedrl.serving.seats import Seats
from seedrl.serving.slots import Indices
from seedrl.serving.staging import HostBatch
from seedrl.types import ModelInput, ModelOutput


class Acted(NamedTuple):
    action: Tensor  # [N, ...]
    keep: Callable[[], None]  # records the rows, unless the device does so by itself
    version: int


class Acting:
    """Owned by the server thread."""

    def __init__(
        self,
        policy: Policy,
        league: League | None,
        seats: Seats,
        step: PolicyStep,
        device: torch.device,
        *,
        graphs: bool,
    ) -> None:
        """`league` has the opponents, if some seats are theirs; with `graphs` the device replays what it recorded."""
        self._policy = policy
        self._league = league
        self._seats = seats
        self._step = step
        self._is_accelerator = is_accelerator(device)
        eager = Eager(step)
        self._program: Program = Graphs(eager, device) if graphs else eager

    @property
    def may_pad(self) -> bool:
        """Return whether batches may have rows that belong to nobody; those of opponents are run in parts."""
        return not self._seats.any_opponents

    def prepare(self, inputs: Inputs) -> None:
        """Run the current policy on inputs of one size, so that later batches of it need nothing new."""
        for model in self._policy.replicas():
            self._program.prepare(model, inputs, self._kind())

    def act(self, batch: HostBatch, inputs: Inputs) -> Acted:
        """Run the policies on a batch.

        An accelerator records while the host waits for the actions. The CPU does so when they are on their way.
        """
        if self._league is not None:
            self._league.begin(batch.slots[(batch.flags & RESET) != 0])
        with self._policy.read() as (model, version):
            if self._is_accelerator and self.may_pad:
                return Acted(self._program.run(model, inputs, self._kind()), _nothing, version)
            forward = self._forward(model, batch.slots)
            if self._is_accelerator:
                return Acted(self._step.run(forward, inputs, self._kind()), _nothing, version)
            computed = self._step.compute(forward, inputs, self._kind())
        return Acted(computed.action, partial(self._step.keep, inputs.staged, computed), version)

    def _kind(self) -> Kind:
        return Kind(self._seats.any_explores, self._seats.any_greedy)

    def _forward(self, current: nn.Module, slots: Indices) -> Forward:
        """Return how the policies that act in these slots are run."""
        league = self._league
        if league is None or not self._seats.any_opponents:
            return partial(run_model, current)

        def run(number: int, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
            return run_model(current if number == CURRENT else league.model_of(number), inputs, core_state)

        entry = self._seats.entry[slots]
        return lambda inputs, core_state: forward_each(entry, inputs, core_state, run)


def _nothing() -> None:
    """The device records rows by itself."""
