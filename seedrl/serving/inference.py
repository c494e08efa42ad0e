"""HOW a batch runs: stage, act, answer, record. Knows nothing of gRPC or of training.

`staging` moves the rows to the device, `acting` runs the policies on them there, `unroll_writer` and `tally` keep the
books of the host.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seedrl.actions import Actions
from seedrl.columns import Record, RowIndices
from seedrl.device import Download
from seedrl.metrics import ServingMetrics, Stopwatch
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.acting import Acting
from seedrl.serving.buckets import padded_size
from seedrl.serving.league import League
from seedrl.serving.policy_step import Inputs, PolicyStep
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import FinishedEpisodes, Indices, Slots, WritePosition
from seedrl.serving.staging import NO_ROWS, HostBatch, Noise, Stager, join
from seedrl.serving.tally import Tally
from seedrl.serving.unroll_writer import UnrollWriter
from seedrl.specs import Arrays, rows_of
from seedrl.store import Store

Answer = tuple[Request, Arrays]  # its actions


class Launched(NamedTuple):
    """A batch that the device works on. Its sessions may end meanwhile."""

    requests: list[Request]
    batch: HostBatch  # of n rows
    position: WritePosition  # [n]
    at: RowIndices  # [N]  of at least those rows
    version: int
    keep: Callable[[], None]  # records the rows, unless the device does so by itself
    dropped: tuple[Session, ...] = ()  # have ended

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.requests if request.session not in self.dropped]

    @property
    def rows(self) -> slice | Indices:
        """The rows that are still of a session."""
        if not self.dropped:
            return slice(len(self.batch.slots))
        is_kept = [np.full(request.rows, request.session not in self.dropped) for request in self.requests]
        return np.concatenate(is_kept).nonzero()[0]


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
        sizes: Sequence[int] = (),
        graphs: bool = False,
    ) -> None:
        """`on_episodes` is called with episodes that end in seats that are trained on, `on_evaluated` with others.

        `fraction` is how much of the run is over, for schedules of exploration. `sizes` are those that batches are
        padded to, smallest first: see `buckets`. With `graphs` each of them is recorded as a graph of the device.
        """
        self._actions = actions
        self._slots = slots
        self._seats = seats
        self._metrics = metrics
        self._noise = Noise(actions, generator, sizes)
        self._stager = Stager(store.columns, slots, seats, device, sizes)
        step = PolicyStep(actions, slots, store.columns)
        self._acting = Acting(policy, league, seats, step, device, graphs=graphs)
        self._writer = UnrollWriter(slots, seats, store, metrics)
        self._tally = Tally(slots, seats, metrics, league, on_episodes, on_evaluated)
        self._download = Download(device)
        self._answer = answer
        self._fraction = fraction
        self._launched: Launched | None = None  # the batch that the device works on
        slots.entry[slots.spare] = store.columns.spare

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run the policy on rows of the spare slot: in the first pass libraries choose and allocate.

        `rows` is the size of an ordinary batch; on an accelerator every size is tried instead, the largest first.
        """
        for size in reversed(self._stager.sizes or (rows,)):
            self._acting.prepare(self._blank(size))

    def _blank(self, size: int) -> Inputs:
        """Return inputs without a request."""
        batch = NO_ROWS.padded(size, self._slots.spare)
        staged = self._stager.stage(batch, self._slots.locate(batch.slots, batch.slots))
        return Inputs(staged, self._stager.observe_nothing(staged.at), self._noise.none(size))

    def run(self, requests: list[Request]) -> None:
        """Answer every request and record its rows."""
        self.launch(requests)
        self.finish()

    @torch.inference_mode()
    def launch(self, requests: list[Request]) -> None:
        """Let the device begin with a batch; `finish` follows."""
        timer = Stopwatch(self._metrics.serving_seconds)
        batch = join(requests)
        if ((batch.flags & RESET) != 0).any():
            for request in requests:  # a new session takes its slots over with the first row of each
                self._writer.claim(request.slots, request.session.id)
        size = self._size(len(batch.slots))
        padded = batch.padded(size, self._slots.spare)
        position = self._slots.locate(padded.slots, padded.slots[(padded.flags & RESET) != 0])
        if self._seats.is_moving:
            self._seats.follow(self._fraction())
        staged = self._stager.stage(padded, position)
        timer.lap("stage")
        observed = self._stager.observe(requests, staged.at)
        timer.lap("copy")
        inputs = Inputs(staged, observed, self._noise.draw_padded(len(batch.slots), size))
        action, keep, version = self._acting.act(batch, inputs)
        self._download.begin(action[: len(batch.slots)])
        own = WritePosition(*(each[: len(batch.slots)] for each in position))
        self._launched = Launched(requests, batch, own, staged.at, version, keep)
        timer.lap("forward")

    def _size(self, rows: int) -> int:
        """Return the size that a batch is padded to."""
        return padded_size(rows, self._stager.sizes) if self._acting.may_pad else rows

    @torch.inference_mode()
    def finish(self) -> None:
        """Answer the requests of the batch that was launched, and record its rows."""
        timer = Stopwatch(self._metrics.serving_seconds)
        launched, self._launched = self._launched, None
        assert launched is not None
        requests, rows = launched.answered, launched.rows
        action = self._download.wait()[rows]
        timer.lap("forward")
        self._answer(_split(requests, self._actions.to_env(action)))
        self._tally.count_answers(requests, launched.version, timer.lap("reply"))
        launched.keep()
        self._record(launched, rows, action)
        timer.lap("record")

    @property
    def is_ready(self) -> bool:
        """Return whether `finish` would return at once, which is always true on the CPU."""
        return self._download.is_ready()

    def _record(self, launched: Launched, rows: slice | Indices, action: NDArray[Any]) -> None:
        """Write down what the host knows of the rows that are still of a session."""
        slots, reward, flags = launched.batch
        batch = HostBatch(slots[rows], reward[rows], flags[rows])
        position = WritePosition(*(each[rows] for each in launched.position))
        last_action, version = self._slots.last_action(batch.slots), np.array(launched.version)
        record = Record(batch.reward, batch.flags, position.age, last_action, action, version)
        self._writer.write(launched.at._replace(host=launched.at.host[rows]), batch.slots, position, record)
        self._tally.count(batch, (batch.flags & RESET) != 0)

    @torch.inference_mode()
    def finish_unrolls(self) -> bool:
        """Hand complete unrolls over and continue in fresh entries; return false while too few are free."""
        return self._writer.finish_unrolls()

    def release(self, session: Session) -> None:
        """Drop what an ended session has recorded and not handed over, and its rows in a batch that was launched.

        Not to be called while `launch` or `finish` runs.
        """
        self._writer.release(session.lease.slots)
        launched = self._launched
        if launched is not None:
            rows = sum(request.rows for request in launched.answered if request.session is session)
            self._metrics.rows_dropped["session_ended"] += rows
            self._launched = launched._replace(dropped=(*launched.dropped, session))


def _split(requests: list[Request], action: Arrays) -> list[Answer]:
    """Return the actions of each request."""
    if len(requests) == 1:
        return [(requests[0], action)]
    answers: list[Answer] = []
    at = 0
    for request in requests:
        answers.append((request, rows_of(action, at, request.rows)))
        at += request.rows
    return answers
