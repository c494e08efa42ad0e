"""HOW a batch runs: upload once, forward, sample, answer, record. Knows nothing of gRPC or of training.

An observation is uploaded here and goes straight into the store; if frames are stacked, the policy reads them back from
there by index, exactly as training will.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.serving.sessions import Request
from seedrl.serving.slots import Indices, Slots
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput
from seedrl.wire.codec import RESET, TERMINATED, TRUNCATED

Answer = tuple[Request, NDArray[np.int32]]


class HostBatch(NamedTuple):
    """The rows of some requests, joined on the host."""

    slots: Indices  # [N]
    observation: NDArray[Any]  # [N, ...]
    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]


class Inference:
    """Owned by the inference thread."""

    def __init__(
        self,
        policy: Policy,
        slots: Slots,
        store: Store,
        metrics: ServingMetrics,
        *,
        generator: torch.Generator,
        device: torch.device,
        answer: Callable[[list[Answer]], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._slots = slots
        self._store = store
        self._metrics = metrics
        self._generator = generator
        self._device = device
        self._answer = answer
        self._stopping = stopping

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        """Answers every live request and records its rows; blocks while the store is full."""
        began = time.monotonic()
        requests = self._drop_dead(requests)
        if not requests:
            return
        batch = _join(requests)
        position = self._slots.locate(batch.slots, batch.flags)
        entry, t, age = (self._upload(index) for index in position)
        slots = self._upload(batch.slots)

        observation = self._upload(batch.observation)
        self._store.write_frames(entry, t, observation)
        if self._store.frame_stack > 1:
            observation = self._store.stacks(entry, t, age)
        core_state = self._slots.core_state.index_select(0, slots)
        inputs = self._inputs(batch, slots, observation)
        output, next_core_state, version = self._forward(inputs, core_state)
        action = sample(output.logits, self._generator)
        self._answer(_split(requests, action.to(torch.int32).cpu().numpy()))

        self._slots.core_state.index_copy_(0, slots, next_core_state)
        self._slots.last_action.index_copy_(0, slots, action)
        if (first := np.flatnonzero(position.t == 0)).size:
            chosen = self._upload(first)
            self._store.begin(entry[chosen], core_state[chosen])
        self._store.write_rows(
            entry,
            t,
            inputs,
            output,
            terminated=self._upload((batch.flags & TERMINATED) != 0),
            truncated=self._upload((batch.flags & TRUNCATED) != 0),
            age=age,
            action=action,
            policy_version=version,
        )
        self._slots.advance(batch.slots)
        self._count(batch)
        self._metrics.inference_seconds += time.monotonic() - began
        self._finish_unrolls(np.flatnonzero(position.t == self._store.unroll_length), batch.slots, core_state)

    def _drop_dead(self, requests: list[Request]) -> list[Request]:
        """Rows whose session ended while they waited are dropped; a new session takes its slots over."""
        alive = []
        for request in requests:
            if not request.session.alive:
                self._metrics.dropped_rows["session_ended"] += request.rows
                continue
            discarded = self._slots.claim(request.slots, request.session.id)
            self._metrics.dropped_rows["partial_unroll"] += discarded
            alive.append(request)
        return alive

    def _inputs(self, batch: HostBatch, slots: Tensor, observation: Tensor) -> ModelInput:
        reset = self._upload((batch.flags & RESET) != 0)
        last_action = self._slots.last_action.index_select(0, slots).masked_fill_(reset, 0)
        return ModelInput(observation, self._upload(batch.reward), last_action, reset)

    def _forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor, int]:
        with self._policy.read() as (model, version):
            one_row = ModelInput(*(tensor.unsqueeze(0) for tensor in inputs))
            output, core_state = model(one_row, core_state)
        return ModelOutput(*(tensor.squeeze(0) for tensor in output)), core_state, version

    def _count(self, batch: HostBatch) -> None:
        finished = self._slots.count_episodes(batch.slots, batch.reward, batch.flags)
        metrics = self._metrics
        metrics.returns.extend(finished.returns.tolist())
        metrics.lengths.extend(finished.lengths.tolist())
        metrics.episodes += len(finished.returns)
        metrics.env_steps += int(np.count_nonzero((batch.flags & RESET) == 0))
        metrics.rows += len(batch.slots)
        metrics.batches += 1

    def _finish_unrolls(self, done: Indices, slots: Indices, core_state: Tensor) -> None:
        """Commits unrolls that have their T+1 rows and goes on in fresh entries, as the learner frees them."""
        while len(done):
            began = time.monotonic()
            fresh = np.array(self._store.reserve(len(done), timeout=0.1), np.int64)
            self._metrics.backpressure_seconds += time.monotonic() - began
            if self._stopping():
                return
            rows, done = done[: len(fresh)], done[len(fresh) :]
            finished = self._slots.entry[slots[rows]]
            fresh_entries = self._upload(fresh)
            self._store.roll(self._upload(finished), fresh_entries)
            self._store.begin(fresh_entries, core_state[self._upload(rows)])
            self._store.slot[finished] = slots[rows]
            self._slots.start_unroll(slots[rows], fresh)
            self._store.commit(finished.tolist())

    def _upload(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One action per row of logits [N, A]: of exponential clocks with these rates, the first to ring."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log_()).argmax(dim=-1)


def _join(requests: list[Request]) -> HostBatch:
    contents = [request.content for request in requests]
    return HostBatch(
        slots=np.concatenate([request.slots for request in requests]),
        observation=np.concatenate([rows.observation for rows in contents]),
        reward=np.concatenate([rows.reward for rows in contents]),
        flags=np.concatenate([rows.flags for rows in contents]),
    )


def _split(requests: list[Request], actions: NDArray[np.int32]) -> list[Answer]:
    ends = np.cumsum([request.rows for request in requests])
    return list(zip(requests, np.split(actions, ends[:-1]), strict=True))
