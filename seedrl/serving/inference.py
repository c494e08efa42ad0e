"""HOW a batch runs: upload once, forward, sample, answer, record. Knows nothing of gRPC or of training.

An observation goes from the message it came in straight into the store; the policy reads it back from there by index,
stacked with the frames before it, exactly as training will.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.device import upload
from seedrl.metrics import ServingMetrics, Stopwatch
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.sessions import ON_POLICY, Request, Session
from seedrl.serving.slots import NOBODY, FinishedEpisodes, Indices, Slots
from seedrl.specs import Arrays, rows_of, tree_map
from seedrl.store import Place, Record, Store
from seedrl.types import ModelInput, ModelOutput, Observation

Answer = tuple[Request, Arrays]  # its actions


class HostBatch(NamedTuple):
    """The rows of some requests, joined on the host; observations stay where they are."""

    slots: Indices  # [N]
    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]


class CompletedUnrolls(NamedTuple):
    """Slots whose unroll is complete, and the core_state [n, S] before its last row."""

    slots: Indices
    core_state: Tensor


class Inference:
    """Owned by the server thread. `finish_unrolls` has to be true before `run`; `release` follows every session."""

    def __init__(
        self,
        policy: Policy,
        actions: Actions,
        slots: Slots,
        store: Store,
        metrics: ServingMetrics,
        *,
        generator: torch.Generator,
        device: torch.device,
        answer: Callable[[list[Answer]], None],
        greedy: bool = True,
        on_evaluated: Callable[[FinishedEpisodes], None] = lambda episodes: None,
    ) -> None:
        """Slots for evaluation take the likeliest action if `greedy`; `on_evaluated` is told of their episodes."""
        self._policy = policy
        self._actions = actions
        self._slots = slots
        self._store = store
        self._metrics = metrics
        self._noise = Noise(actions, generator)
        self._device = device
        self._answer = answer
        self._greedy = greedy
        self._on_evaluated = on_evaluated
        self._full = CompletedUnrolls(np.zeros(0, np.int64), torch.zeros(0, 0))

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """A forward pass that nobody waits for: in the first one libraries choose and allocate. Records nothing."""
        first = np.zeros(rows, np.int64)
        observation = self._store.stacks(self._store.place(first, first, first))
        reward = torch.zeros(rows, device=self._device)
        last_action = upload(self._slots.last_action(first), self._device)
        inputs = ModelInput(observation, reward, last_action, reward.bool())
        self._forward(inputs.tree_map(torch.zeros_like), torch.zeros_like(self._slots.core_state(first)))

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        """Answers every request and records its rows."""
        timer = Stopwatch(self._metrics.serving_seconds)
        batch = _join(requests)
        reset = (batch.flags & RESET) != 0
        resets = batch.slots[reset]
        if len(resets):
            for request in requests:  # a new session takes its slots over with the first row of each
                self._claim(request.slots, request.session.id, request.evaluates)
        position = self._slots.locate(batch.slots, resets)
        place = self._store.place(*position)
        core_state = self._slots.core_state(batch.slots)
        last_action = self._slots.last_action(batch.slots)
        timer.lap("stage")
        inputs = ModelInput(
            self._observe(requests, place),
            upload(batch.reward, self._device),
            upload(last_action, self._device),
            upload(reset, self._device),
        )
        timer.lap("copy")
        output, next_core_state, version = self._forward(inputs, core_state)
        if any(request.session.exploration is not ON_POLICY for request in requests):
            output = output._replace(logits=self._explored(requests, output.logits))
        action = self._actions.choose(output.logits, self._noise_for(batch.slots)).cpu().numpy()
        timer.lap("forward")
        self._answer(_split(requests, self._actions.to_env(action)))
        self._count_answers(requests, version, timer.lap("reply"))

        record = Record(batch.reward, batch.flags, position.age, last_action, action, np.array(version))
        self._store.write_rows(place, record, output)
        if core_state.shape[1] and (first := (position.t == 0).nonzero()[0]).size:
            self._store.begin(position.entry[first], core_state[upload(first, self._device)])
        self._slots.advance(batch.slots, action, next_core_state)
        self._count(batch, reset)
        full = (position.t == self._store.unroll_length).nonzero()[0]
        if len(full) and self._slots.any_evaluate:
            full = self._begin_again(batch.slots, full)
        if len(full):
            self._full = CompletedUnrolls(batch.slots[full], core_state[upload(full, self._device)])
        timer.lap("record")

    def _explored(self, requests: list[Request], logits: Tensor) -> Tensor:
        """What actions are really drawn from, so that it is recorded; who acts as trained keeps its logits."""
        counts = [request.rows for request in requests]
        by_request = np.array([request.session.exploration for request in requests], np.float32)
        temperature, epsilon = upload(np.ascontiguousarray(by_request.repeat(counts, axis=0).T), self._device)
        explores = (temperature != ON_POLICY.temperature) | (epsilon != ON_POLICY.epsilon)
        return torch.where(explores.unsqueeze(-1), self._actions.explored(logits, temperature, epsilon), logits)

    def _noise_for(self, slots: Indices) -> Tensor:
        """Without noise the likeliest action is chosen."""
        noise = self._noise.draw(len(slots))
        if not (self._greedy and self._slots.any_evaluate):
            return noise
        return noise.masked_fill(upload(self._slots.evaluates[slots], self._device).unsqueeze(-1), 0.0)

    def _begin_again(self, slots: Indices, full: Indices) -> Indices:
        """Evaluation goes on at the beginning of its own entry, so that nobody trains on it; returns the other rows."""
        evaluates = self._slots.evaluates[slots[full]]
        again = slots[full[evaluates]]
        entries = self._slots.entry[again]
        self._store.roll(entries, entries)
        self._slots.start_unroll(again, entries)
        return full[~evaluates]

    @torch.inference_mode()
    def finish_unrolls(self) -> bool:
        """Commits unrolls that have their T+1 rows and goes on in fresh entries; false while there are too few."""
        slots, core_state = self._full
        if not len(slots):
            return True
        fresh = self._store.reserve(len(slots))
        n = len(fresh)
        if n:
            timer = Stopwatch(self._metrics.serving_seconds)
            finished = self._slots.entry[slots[:n]]
            self._store.roll(finished, fresh)
            self._store.begin(fresh, core_state[:n])
            self._store.slot[finished] = slots[:n]
            self._slots.start_unroll(slots[:n], fresh)
            self._store.commit(finished.tolist())
            self._full = CompletedUnrolls(slots[n:], core_state[n:])
            self._metrics.unrolls_made += n
            timer.lap("record")
        return n == len(slots)

    def release(self, session: Session) -> None:
        """A session has ended, and what it recorded and did not hand over goes with it; not while `run` runs."""
        kept = np.flatnonzero(~np.isin(self._full.slots, session.lease.slots))
        if len(kept) < len(self._full.slots):
            core_state = self._full.core_state[upload(kept, self._device)]
            self._full = CompletedUnrolls(self._full.slots[kept], core_state)
        self._claim(session.lease.slots, NOBODY)

    def _claim(self, slots: Indices, session_id: int, evaluates: Any = False) -> None:
        discarded = self._slots.claim(slots, session_id, evaluates)
        self._metrics.rows_dropped["partial_unroll"] += int(discarded.sum())
        self._metrics.unrolls_dropped["session_ended"] += int(np.count_nonzero(discarded))

    def _observe(self, requests: list[Request], place: Place) -> Observation:
        """Moves the observations into the store; returns them stacked [N, ...]."""
        at = 0
        for request in requests:
            self._store.write_frames(place.frame[at : at + request.rows], request.content.observation)
            at += request.rows
        if len(requests) == 1 and self._store.frame_stack == 1:
            (request,) = requests  # what would be read back
            return tree_map(lambda values: upload(values, self._device), request.content.observation)
        return self._store.stacks(place)

    def _forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor, int]:
        with self._policy.read() as (model, version):
            output, core_state = model(inputs.tree_map(lambda tensor: tensor.unsqueeze(0)), core_state)
        return ModelOutput(*(tensor.squeeze(0) for tensor in output)), core_state, version

    def _count(self, batch: HostBatch, reset: NDArray[np.bool_]) -> None:
        finished = self._slots.count_episodes(batch.slots, batch.reward, batch.flags)
        metrics = self._metrics
        rows = len(batch.slots)
        steps = rows - int(np.count_nonzero(reset))
        if self._slots.any_evaluate:
            finished = self._count_evaluation(finished)
            evaluated = int(np.count_nonzero(self._slots.evaluates[batch.slots] & ~reset))
            metrics.eval_steps += evaluated
            steps -= evaluated
        if len(finished.returns):
            metrics.returns.extend(finished.returns.tolist())
            metrics.lengths.extend(finished.lengths.tolist())
            metrics.episode_return.observe_all(finished.returns)
            metrics.episode_length.observe_all(finished.lengths)
            metrics.episodes += len(finished.returns)
        metrics.env_steps += steps
        metrics.rows += rows
        metrics.batches += 1
        metrics.batch_rows.observe(rows)

    def _count_evaluation(self, finished: FinishedEpisodes) -> FinishedEpisodes:
        """Counts the episodes that are evaluation's; returns the others."""
        evaluates = self._slots.evaluates[finished.slots]
        if not evaluates.any():
            return finished
        own, metrics = finished.where(evaluates), self._metrics
        metrics.eval_returns.extend(own.returns.tolist())
        metrics.eval_return.observe_all(own.returns)
        metrics.eval_length.observe_all(own.lengths)
        metrics.eval_episodes += len(own.returns)
        self._on_evaluated(own)
        return finished.where(~evaluates)

    def _count_answers(self, requests: list[Request], version: int, now: float) -> None:
        for request in requests:
            request.session.policy_version = version
            self._metrics.act_latency_seconds.observe(now - request.arrived)


class Noise:
    """Drawn for many rows at once: a device is asked for random numbers now and then, not every batch."""

    def __init__(self, actions: Actions, generator: torch.Generator, stock: int = 4096) -> None:
        self._actions = actions
        self._generator = generator
        self._stock = stock  # rows
        self._rest = torch.empty(0, 0)

    def draw(self, rows: int) -> Tensor:
        """[rows, ...], as `Actions.choose` needs it."""
        if len(self._rest) < rows:
            self._rest = self._actions.noise(max(rows, self._stock), self._generator)
        noise, self._rest = self._rest[:rows], self._rest[rows:]
        return noise


def _join(requests: list[Request]) -> HostBatch:
    if len(requests) == 1:
        (request,) = requests
        return HostBatch(request.slots, request.content.reward, request.content.flags)
    contents = [request.content for request in requests]
    return HostBatch(
        slots=np.concatenate([request.slots for request in requests]),
        reward=np.concatenate([rows.reward for rows in contents]),
        flags=np.concatenate([rows.flags for rows in contents]),
    )


def _split(requests: list[Request], action: Arrays) -> list[Answer]:
    if len(requests) == 1:
        return [(requests[0], action)]
    answers: list[Answer] = []
    at = 0
    for request in requests:
        answers.append((request, rows_of(action, at, request.rows)))
        at += request.rows
    return answers
