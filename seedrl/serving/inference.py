"""HOW a batch runs: upload once, forward, sample, answer, record. Knows nothing of gRPC or of training.

An observation goes from the message it came in straight into the store; the policy reads it back from there by index,
stacked with the frames before it, exactly as training will.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.bank import CURRENT
from seedrl.columns import Record, RowIndices
from seedrl.device import Download, Staging, is_accelerator, upload
from seedrl.metrics import DROPPED_UNROLLS, ServingMetrics, Stopwatch
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.league import League
from seedrl.serving.mixture import forward_each
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import NOBODY, FinishedEpisodes, Indices, Slots, WritePosition
from seedrl.specs import Arrays, rows_of, tree_map
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput, Observation

Answer = tuple[Request, Arrays]  # its actions


class HostBatch(NamedTuple):
    """The rows of some requests, joined on the host; observations stay where they are."""

    slots: Indices  # [N]
    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]


class Staged(NamedTuple):
    """The small part of a batch on the device, uploaded at once."""

    at: RowIndices
    slots: Tensor  # [N]
    reward: Tensor  # [N]
    last_action: Tensor  # [N, ...]
    reset: Tensor  # [N]  bool
    exploration: Tensor  # [4, N]  temperature, epsilon, whether it explores, whether it is greedy; [4, 0] if none does
    core_places: list[Tensor]  # see Columns.core_places


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
        self._actions = actions
        self._slots = slots
        self._seats = seats
        self._store = store
        self._columns = store.columns
        self._metrics = metrics
        self._noise = Noise(actions, generator)
        self._device = device
        self._is_accelerator = is_accelerator(device)
        self._small, self._frames = Staging(device), Staging(device)
        self._download = Download(device)
        self._answer = answer
        self._on_episodes = on_episodes
        self._on_evaluated = on_evaluated
        self._fraction = fraction
        self._league = league  # if some seats are those of opponents
        self._full = np.zeros(0, np.int64)  # slots whose unroll is complete and not handed over yet

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run a forward pass without a request: in the first one libraries choose and allocate. Records nothing."""
        first = np.zeros(rows, np.int64)
        nothing = HostBatch(first, np.zeros(rows, np.float32), np.zeros(rows, np.uint8))
        position, last_action = WritePosition(first, first, first), self._slots.last_action(first)
        staged = self._stage(nothing, nothing.flags != 0, position, last_action)
        observation = self._columns.stacks(staged.at)
        inputs = ModelInput(observation, staged.reward, staged.last_action, staged.reset)
        core_state = torch.zeros_like(self._slots.core_state(staged.slots))
        self._forward(inputs.tree_map(torch.zeros_like), core_state)

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        """Answers every request and records its rows."""
        timer = Stopwatch(self._metrics.serving_seconds)
        batch = _join(requests)
        reset = (batch.flags & RESET) != 0
        resets = batch.slots[reset]
        if len(resets):
            for request in requests:  # a new session takes its slots over with the first row of each
                self._claim(request.slots, request.session.id)
        position = self._slots.locate(batch.slots, resets)
        last_action = self._slots.last_action(batch.slots)
        if self._seats.is_moving:
            self._seats.follow(self._fraction())
        staged = self._stage(batch, reset, position, last_action)
        timer.lap("stage")
        observation = self._observe(requests, staged.at)
        inputs = ModelInput(observation, staged.reward, staged.last_action, staged.reset)
        core_state = self._slots.core_state(staged.slots)
        timer.lap("copy")
        if self._seats.any_opponents:
            output, next_core_state, version = self._forward_all(batch.slots, resets, inputs, core_state)
        else:
            output, next_core_state, version = self._forward(inputs, core_state)
        if self._seats.any_explores:
            output = output._replace(logits=self._explored(output.logits, staged.exploration))
        noise = self._noise_for(len(batch.slots), staged.exploration)
        self._download.begin(self._actions.choose(output.logits, noise))
        keep = partial(self._keep, staged, output, core_state, next_core_state)
        if self._is_accelerator:  # which works on while the host waits for the actions
            keep()
        action = self._download.wait()
        timer.lap("forward")
        self._answer(_split(requests, self._actions.to_env(action)))
        self._count_answers(requests, version, timer.lap("reply"))

        if not self._is_accelerator:
            keep()
        record = Record(batch.reward, batch.flags, position.age, last_action, action, np.array(version))
        self._columns.write_record(staged.at, record)
        self._slots.advance(batch.slots, action)
        self._count(batch, reset)
        full = batch.slots[position.t == self._columns.unroll_length]
        if len(full):
            self._full = full if self._seats.all_trained else self._recycle_untrained(full)
        timer.lap("record")

    def _stage(
        self, batch: HostBatch, reset: NDArray[np.bool_], position: WritePosition, last_action: NDArray[Any]
    ) -> Staged:
        """Upload everything that is known of a batch before it runs, but its observations."""
        columns, seats = self._columns, self._seats
        index = columns.indices(*position)
        places = columns.core_places(position.entry, position.t) if columns.core_size else []
        there, slots, reward, action_before, is_reset, exploration, *core_places = self._small.upload(
            index, batch.slots, batch.reward, last_action, reset, seats.columns(batch.slots), *places
        )
        at = columns.rows_at(index, there if columns.are_on_device else torch.from_numpy(index))
        return Staged(at, slots, reward, action_before, is_reset, exploration, core_places)

    def _keep(self, staged: Staged, output: ModelOutput, core_state: Tensor, next_core_state: Tensor) -> None:
        """Write what the model made of a batch to the store and the slots."""
        self._columns.write_output(staged.at, output)
        if staged.core_places:
            self._columns.keep_core_state(staged.core_places, core_state)
            self._slots.keep_core_state(staged.slots, next_core_state)

    def _explored(self, logits: Tensor, exploration: Tensor) -> Tensor:
        """Return the logits that actions are really drawn from, so that those are recorded."""
        temperature, epsilon, explores, _ = exploration
        explored = self._actions.explored(logits, temperature, epsilon)
        return torch.where(explores.bool().unsqueeze(-1), explored, logits)

    def _noise_for(self, rows: int, exploration: Tensor) -> Tensor:
        """Draw the noise that actions are sampled with; without noise the most likely action is chosen."""
        noise = self._noise.draw(rows)
        return noise.masked_fill(exploration[3].bool().unsqueeze(-1), 0.0) if self._seats.any_greedy else noise

    def _recycle_untrained(self, full: Indices) -> Indices:
        """Let slots that are not trained on continue at the beginning of their own entry; return the other slots."""
        is_trained = self._seats.is_trained[full]
        again = full[~is_trained]
        entries = self._slots.entry[again]
        self._columns.roll(entries, entries)
        self._slots.start_unroll(again, entries, self._columns.overlap)
        return full[is_trained]

    @torch.inference_mode()
    def finish_unrolls(self) -> bool:
        """Hand complete unrolls over and continue in fresh entries; return false while too few are free."""
        while len(self._full):
            fresh = self._store.reserve(len(self._full))
            if not len(fresh):
                return False
            self._hand_over(fresh)
        return True

    def _hand_over(self, fresh: Indices) -> None:
        """Commit as many complete unrolls as there are fresh entries."""
        timer, n = Stopwatch(self._metrics.serving_seconds), len(fresh)
        slots, self._full = self._full[:n], self._full[n:]
        finished = self._slots.entry[slots]
        self._columns.roll(finished, fresh)
        self._slots.start_unroll(slots, fresh, self._columns.overlap)
        self._store.commit(finished)
        self._metrics.unrolls_made += n
        for reason, count in self._store.take_dropped().items():
            self._metrics.unrolls_dropped[reason if reason in DROPPED_UNROLLS else "other"] += count
        timer.lap("record")

    def release(self, session: Session) -> None:
        """Drop what an ended session has recorded and not handed over; not to be called while `run` runs."""
        self._full = self._full[~np.isin(self._full, session.lease.slots)]
        self._claim(session.lease.slots, NOBODY)

    def _claim(self, slots: Indices, session_id: int) -> None:
        taken, rows = self._slots.claim(slots, session_id)
        lost = rows * self._seats.is_trained[taken]
        self._metrics.rows_dropped["partial_unroll"] += int(lost.sum())
        self._metrics.unrolls_dropped["session_ended"] += int(np.count_nonzero(lost))

    def _observe(self, requests: list[Request], at: RowIndices) -> Observation:
        """Move the observations into the store; return them stacked [N, ...]."""
        if self._is_accelerator and self._columns.are_on_device:
            observations = [request.content.observation for request in requests]
            joined = self._columns.upload_frames(at.frame, observations, self._frames)
            return joined if self._columns.frame_stack == 1 else self._columns.stacks(at)
        start = 0
        for request in requests:
            self._columns.write_frames(at.frame[start : start + request.rows], request.content.observation)
            start += request.rows
        if len(requests) == 1 and self._columns.frame_stack == 1:
            (request,) = requests  # what would be read back
            return tree_map(lambda values: upload(values, self._device), request.content.observation)
        return self._columns.stacks(at)

    def _forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor, int]:
        with self._policy.read() as (model, version):
            return *_run(model, inputs, core_state), version

    def _forward_all(
        self, slots: Indices, resets: Indices, inputs: ModelInput, core_state: Tensor
    ) -> tuple[ModelOutput, Tensor, int]:
        """Let the league choose opponents where games begin; then run the policies that act in these rows."""
        league = self._league
        assert league is not None
        league.begin(resets)

        def forward(number: int, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
            if number == CURRENT:
                return self._forward(inputs, core_state)[:2]
            return _run(league.model_of(number), inputs, core_state)

        return *forward_each(self._seats.entry[slots], inputs, core_state, forward), self._policy.version

    def _count(self, batch: HostBatch, reset: NDArray[np.bool_]) -> None:
        finished = self._slots.count_episodes(batch.slots, batch.reward, batch.flags)
        metrics = self._metrics
        rows = len(batch.slots)
        steps = rows - int(np.count_nonzero(reset))
        if not self._seats.all_trained:
            finished = self._count_untrained(finished)
            untrained = batch.slots[~self._seats.is_trained[batch.slots] & ~reset]
            opponents = int(np.count_nonzero(self._seats.is_opponent[untrained]))
            metrics.opponent_steps += opponents
            metrics.eval_steps += len(untrained) - opponents
            steps -= len(untrained)
            batch = batch._replace(reward=batch.reward * self._seats.is_trained[batch.slots])
        if len(finished.returns):
            metrics.returns.extend(finished.returns.tolist())
            metrics.lengths.extend(finished.lengths.tolist())
            metrics.episode_return.observe_all(finished.returns)
            metrics.episode_length.observe_all(finished.lengths)
            metrics.episodes += len(finished.returns)
            self._on_episodes(finished)
        metrics.env_steps += steps
        metrics.reward_sum += float(batch.reward.sum(dtype=np.float64))
        metrics.rows += rows
        metrics.batches += 1
        metrics.batch_rows.observe(rows)

    def _count_untrained(self, finished: FinishedEpisodes) -> FinishedEpisodes:
        """Count games against opponents and episodes of evaluation; return those of seats that are trained on."""
        if self._league is not None:
            finished = finished.where(~self._seats.is_opponent[finished.slots])
            self._league.finish(finished)
        is_trained = self._seats.is_trained[finished.slots]
        if is_trained.all():
            return finished
        own, metrics = finished.where(~is_trained), self._metrics
        metrics.eval_returns.extend(own.returns.tolist())
        metrics.eval_return.observe_all(own.returns)
        metrics.eval_length.observe_all(own.lengths)
        metrics.eval_episodes += len(own.returns)
        self._on_evaluated(own)
        return finished.where(is_trained)

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


def _run(model: nn.Module, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
    """Run a model on one row of each slot [N, ...]."""
    output, core_state = model(inputs.tree_map(lambda tensor: tensor.unsqueeze(0)), core_state)
    return ModelOutput(output.logits.squeeze(0), output.value.squeeze(0)), core_state


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
