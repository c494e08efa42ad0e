"""The serving half without gRPC: policy, slots, store and inference, driven by hand and in one thread."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from envs_server.pool import Pool
from seedrl.actions import Actions
from seedrl.bank import Bank
from seedrl.config import LeagueConfig
from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.rows import RESET, Rows
from seedrl.selection.base import Entries, Priority, Selector
from seedrl.selection.fifo import Fifo
from seedrl.serving.inference import Answer, Inference
from seedrl.serving.league import League
from seedrl.serving.lease import Lease
from seedrl.serving.seats import CONSTANT, Schedule, Seat, Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import FinishedEpisodes, Slots
from seedrl.specs import EnvSpec
from seedrl.store import Store, StoreSizes
from seedrl.wire.messages import Hello
from tests.fakes import TinyModel

CPU = torch.device("cpu")


def make_rows(observation: Any, flags: Any = RESET, env_id: Sequence[int] | None = None, reward: Any = 0) -> Rows:
    """Return rows of environments 0 … n-1, or of `env_id`; flags and rewards are broadcast."""
    observation = np.asarray(observation)
    n = len(observation)
    return Rows(
        env_id=np.arange(n, dtype=np.int32) if env_id is None else np.array(env_id, np.int32),
        observation=observation,
        reward=np.broadcast_to(np.asarray(reward, np.float32), n).copy(),
        flags=np.broadcast_to(np.asarray(flags, np.uint8), n).copy(),
    )


def stacked(spec: EnvSpec, frames: int) -> EnvSpec:
    return spec.stacked(frames)


def make_model(spec: EnvSpec, core_size: int = 0) -> TinyModel:
    """Return a model that always has the same weights; torch's own generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel(spec, core_size)


class CountingFifo(Fifo):
    """Counts the unrolls that were handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        super().add(entries, versions, priority)
        self.added += len(entries)


class Rig:
    """`run` gives a batch of requests to inference and returns the actions each of them got."""

    def __init__(
        self,
        spec: EnvSpec,
        model: nn.Module | None = None,
        *,
        slots: int = 4,
        capacity: int = 64,
        unroll_length: int = 4,
        frame_stack: int = 1,
        seed: int = 0,
        overlap: int = 1,
        schedule: Schedule = CONSTANT,
        selector: Selector | None = None,
        device: torch.device = CPU,
        memory: torch.device | None = None,
        players: int = 1,
        league: LeagueConfig | None = None,
        sizes: Sequence[int] = (),
        graphs: bool = False,
    ) -> None:
        self.model = (model if model is not None else make_model(stacked(spec, frame_stack))).to(device)
        core_size = int(self.model.core_size)
        self.policy = Policy(self.model, version=0)
        self.metrics = ServingMetrics()
        self.slots = Slots(slots, Actions(spec), frame_stack, core_size, device)
        self.seats = Seats(slots, schedule, players)
        settings = league or LeagueConfig()
        self.bank = Bank(self.model, settings.snapshots, settings.snapshot_updates)
        self.league = League(settings, self.bank, self.seats, self.metrics, seed) if league else None
        self.fraction = 0.0  # of the run that is over
        self.selector = CountingFifo()
        room = StoreSizes(slots, capacity, unroll_length, frame_stack, core_size, overlap)
        self.store = Store(spec, self.selector if selector is None else selector, room, device, memory=memory)
        self.answers: list[Answer] = []
        self.evaluated: list[FinishedEpisodes] = []
        self.inference = Inference(
            self.policy,
            Actions(spec),
            self.slots,
            self.seats,
            self.store,
            self.metrics,
            generator=torch.Generator(device).manual_seed(seed),
            device=device,
            answer=self.answers.extend,
            on_evaluated=self.evaluated.append,
            fraction=lambda: self.fraction,
            league=self.league,
            sizes=sizes,
            graphs=graphs,
        )
        self._sessions = 0
        self._requests = 0

    def join(self, slots: Sequence[int], seats: Sequence[Seat] | None = None) -> Session:
        """Return a new session with these slots and seats; the session that had them before does not end."""
        self._sessions += 1
        n = len(slots)
        self.seats.assign(np.array(slots, np.int64), seats or [Seat()] * n)
        return Session(
            id=self._sessions,
            hello=Hello("actor"),
            lease=Lease(np.array(slots, np.int64), np.full(n, RESET, np.uint8)),
        )

    def request(self, session: Session, rows: Rows) -> Request:
        self._requests += 1
        return Request(session, self._requests, rows, session.lease.slots[rows.env_id])

    def run(self, *requests: Request) -> list[NDArray[np.int64]]:
        self.answers.clear()
        self.inference.run(list(requests))
        assert self.inference.finish_unrolls(), "the store is too small for this test"
        return [action for _, action in self.answers]

    def play(self, session: Session, pool: Pool, steps: int) -> list[Rows]:
        """Drive a pool for some requests; return its rows."""
        history = []
        for _ in range(steps):
            rows = pool.recv()
            (action,) = self.run(self.request(session, rows))
            pool.send(action.astype(np.int32), rows.env_id)
            history.append(rows)
        return history
