"""A11: exactly one action per observation, contiguous steps, nothing mixed, under any mix of what sessions can do.

Session protocol, session table, batcher, inference and store as a learner has them, without gRPC: messages go in and
out by hand.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedrl.config import LearnerConfig
from seedrl.errors import InvalidMessage, NoCapacity, Superseded, TooLate
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.serving.balance import Balance
from seedrl.serving.batcher import Batcher
from seedrl.serving.protocol import SessionProtocol
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.serving.stream import Connection
from seedrl.wire import codec
from seedrl.wire.framing import parse, serialize
from seedrl.wire.messages import Hello, StepParts, Welcome
from tests.fakes import FakeClock
from tests.integration.support import SPEC, OracleModel, right_action
from tests.rig import Rig

ENVS = 2
SLOTS = 5  # room for two actors and a remainder
ACTORS = 3
T = 3
CAPACITY = 3
MAX_WAIT = 0.5


@dataclass
class FakeActor:
    """The actor's side: what it has said, and what it waits for."""

    instance: str
    epoch: int = 0
    session: Session | None = None
    requests: int = 0
    waiting: dict[int, Rows] = field(default_factory=dict)  # by request id
    count: list[int] = field(default_factory=list)  # [ENVS]  rows of this session
    flags: list[int] = field(default_factory=list)  # [ENVS]  of the newest row

    def begin(self, session: Session) -> None:
        self.session, self.waiting = session, {}
        self.count, self.flags = [0] * ENVS, [TERMINATED] * ENVS

    def idle(self) -> list[int]:
        """Environments with no row in flight."""
        busy = {int(env) for rows in self.waiting.values() for env in rows.env_id}
        return [env for env in range(ENVS) if env not in busy]

    def step(self, envs: list[int], ending: int) -> StepParts:
        """The next rows of these; observations tell environment, number of the row and session."""
        assert self.session is not None
        flags = [RESET if self.flags[env] & ENDED else ending for env in envs]
        rows = Rows(
            env_id=np.array(envs, np.int32),
            observation=np.array([[env, self.count[env], self.session.id] for env in envs], np.float32),
            reward=np.array([0.0 if flag & RESET else 1.0 for flag in flags], np.float32),
            flags=np.array(flags, np.uint8),
        )
        self.requests += 1
        self.waiting[self.requests] = rows
        for env, flag in zip(envs, flags, strict=True):
            self.count[env] += 1
            self.flags[env] = flag
        step = parse(serialize(codec.encode_step(self.requests, rows)))
        assert isinstance(step, StepParts)
        return step

    def read(self, act: Any) -> None:
        """Every action has to be the one for its observation; a request that is not waited for has no place here."""
        answered = [self.waiting.pop(request_id) for request_id in act.request_id]
        action = codec.decode_act(act, SPEC, sum(len(rows.env_id) for rows in answered))
        assert action.tolist() == [int(right) for rows in answered for right in right_action(rows.observation)]


class Learner(RuleBasedStateMachine):
    """Actors join, step, read, vanish, supersede themselves and stray; the learner serves and trains when it likes."""

    def __init__(self) -> None:
        super().__init__()
        config = LearnerConfig()
        config.serving.max_slots, config.actors.envs, config.actors.groups = SLOTS, ENVS, 1
        self.rig = Rig(SPEC, OracleModel(SPEC), slots=SLOTS, capacity=CAPACITY, unroll_length=T)
        self.clock = FakeClock()
        self.batcher: Batcher[Request] = Batcher(max_rows=3, min_rows=2, max_wait=MAX_WAIT, clock=self.clock)
        self.table = SessionTable(
            config, lambda session_id: session_id, planned_seats(config), on_leave=self.rig.inference.release
        )
        self.table.agree(SPEC)
        self.protocol = SessionProtocol(
            config, self.table, Balance(self.table), self.batcher, self.rig.metrics, say=lambda words: None
        )
        self.rig.inference._answer = self.protocol.answer
        self.actors = [FakeActor(f"actor-{number}") for number in range(ACTORS)]
        self.asked = 0  # rows
        self.ended = 0  # sessions
        self.learned: dict[tuple[int, int], int] = defaultdict(int)  # (session, environment) → its newest row learned

    # Actors.

    @rule(which=st.integers(0, ACTORS - 1))
    def join(self, which: int) -> None:
        """Perhaps while the learner still believes in a session before: that one ends first."""
        actor = self.actors[which]
        actor.epoch += 1
        older = actor.session
        taken = len(self.table.open) - (older is not None)
        try:
            session, job = self.greet(Hello("actor", "", actor.instance, actor.epoch))
        except NoCapacity:
            assert taken == SLOTS // ENVS
            self.ended += older is not None
            actor.session = None
            return
        assert taken < SLOTS // ENVS
        self.ended += older is not None
        assert older is None or isinstance(older.evicted, Superseded)
        assert job.session_id == session.id
        self.protocol.connections[session.id] = Connection(Limit())
        actor.begin(session)

    @rule(which=st.integers(0, ACTORS - 1), age=st.integers(0, 2))
    def stray(self, which: int, age: int) -> None:
        """A Hello that was on its way for long is refused while a newer session is open, and changes nothing."""
        actor = self.actors[which]
        if actor.session is not None:
            with pytest.raises(Superseded):
                self.greet(Hello("stray", "", actor.instance, actor.epoch - age))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), ending=st.sampled_from([0, 0, TERMINATED, TRUNCATED]))
    def step(self, data: st.DataObject, ending: int) -> None:
        actor = data.draw(st.sampled_from(self.alive()))
        if idle := actor.idle():
            envs = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True))
            self.ask(actor, actor.step(envs, ending))

    @precondition(lambda self: any(actor.waiting for actor in self.alive()))
    @rule(data=st.data())
    def step_out_of_turn(self, data: st.DataObject) -> None:
        """A row for an environment in flight is refused, and its session ends."""
        actor = data.draw(st.sampled_from([actor for actor in self.alive() if actor.waiting]))
        assert actor.session is not None
        if actor.session.lease.in_flight:
            rows = next(rows for rows in actor.waiting.values())
            with pytest.raises(InvalidMessage):
                actor.session.admit(rows)
            self.end(actor)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.drain(data.draw(st.sampled_from(self.alive())))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), evicted=st.booleans())
    def leave(self, data: st.DataObject, evicted: bool) -> None:
        actor = data.draw(st.sampled_from(self.alive()))
        if evicted:
            assert actor.session is not None
            self.protocol._evict(actor.session, TooLate("silent"))
        self.end(actor)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), ending=st.sampled_from([0, TERMINATED]))
    def move(self, data: st.DataObject, ending: int) -> None:
        """What an actor has sent before it hears that it is to go elsewhere is counted, and waits for nothing."""
        actor = data.draw(st.sampled_from(self.alive()))
        session = actor.session
        assert session is not None
        self.protocol._move(session, "127.0.0.1:1", "drain", "asked to")
        if idle := actor.idle():
            step = actor.step(data.draw(st.lists(st.sampled_from(idle), unique=True, min_size=1)), ending)
            waiting = self.batcher.waiting_rows
            self.protocol._take(self.protocol._request(step, session, SPEC))
            assert self.batcher.waiting_rows == waiting
            self.asked += len(step.flags)
        self.end(actor)

    # The learner.

    @rule(seconds=st.sampled_from([0.0, MAX_WAIT]))
    def serve(self, seconds: float) -> None:
        """Do what BatchLoop does again and again, on an accelerator: sessions may end before the batch does."""
        self.clock.advance(seconds)
        if self.rig.inference._launched is not None:
            self.rig.inference.finish()
        elif self.rig.inference.finish_unrolls() and (requests := self.batcher.take()):
            assert all(request.session.alive for request in requests)
            self.rig.inference.launch(requests)

    @precondition(lambda self: self.rig.store.ready)
    @rule()
    def learn(self) -> None:
        unrolls = self.rig.store.take(1, timeout=0)
        assert unrolls is not None
        observation = unrolls.inputs.observation[:, 0]
        ((env, session),) = {(int(row[0]), int(row[2])) for row in observation}  # of one session and environment
        first = self.learned[session, env]
        assert observation[:, 1].tolist() == list(range(first, first + T + 1))
        assert unrolls.action[:, 0].tolist() == right_action(observation).tolist()
        self.learned[session, env] = first + T

    # What always holds.

    @invariant()
    def no_slot_is_leased_twice(self) -> None:
        leased = [int(slot) for session in self.table.open.values() for slot in session.lease.slots]
        assert len(leased) == len(set(leased)) == SLOTS - len(self.table._free)
        assert set(leased).isdisjoint(self.table._free)

    @invariant()
    def every_row_is_answered_or_waits_or_was_dropped(self) -> None:
        metrics = self.rig.metrics
        launched = self.rig.inference._launched
        acting = sum(request.rows for request in launched.answered) if launched else 0
        assert self.asked == metrics.rows + self.batcher.waiting_rows + acting + metrics.rows_dropped["session_ended"]
        assert self.batcher.waiting_rows <= SLOTS
        for actor in self.alive():
            assert actor.session is not None
            assert actor.session.lease.in_flight + actor.session.traffic.unsent == sum(
                map(len_rows, actor.waiting.values())
            )

    @invariant()
    def every_answered_row_is_recorded_or_was_dropped(self) -> None:
        """Consecutive unrolls share a row, so each hands T rows over."""
        metrics, leased = self.rig.metrics, [session.lease.slots for session in self.table.open.values()]
        recorded = int(self.rig.slots._next_row.sum())
        assert recorded == sum(int(self.rig.slots._next_row[slots].sum()) for slots in leased)
        assert metrics.rows == T * self.rig.selector.added + recorded + metrics.rows_dropped["partial_unroll"]
        assert metrics.unrolls_made == self.rig.selector.added

    @invariant()
    def sessions_add_up(self) -> None:
        assert self.rig.metrics.sessions_joined == len(self.table.open) + self.ended
        assert {actor.session.id for actor in self.alive() if actor.session} == set(self.table.open)

    # Parts of the above.

    def greet(self, greeting: Hello) -> tuple[Session, Welcome]:
        self.protocol._make_way(greeting)
        return self.protocol._admit(greeting, peer="", envs=ENVS)

    def alive(self) -> list[FakeActor]:
        return [actor for actor in self.actors if actor.session is not None]

    def ask(self, actor: FakeActor, step: StepParts) -> None:
        assert actor.session is not None
        actor.session.expect_reader()
        self.batcher.submit(self.protocol._request(step, actor.session, SPEC))
        self.asked += len(step.flags)

    def drain(self, actor: FakeActor) -> None:
        """All Acts that wait for it, as the writer of its stream sends them."""
        assert actor.session is not None
        outbox = self.protocol.connections[actor.session.id].outbox
        while not outbox.empty():
            message, rows = outbox.get_nowait()
            actor.session.traffic.unsent -= rows
            actor.read(message)

    def end(self, actor: FakeActor) -> None:
        assert actor.session is not None
        self.protocol._end(actor.session)
        actor.session = None
        self.ended += 1


class Limit:
    """Stands for the stream of a session: ended by whoever evicts it."""

    def reschedule(self, when: float) -> None:
        pass


def len_rows(rows: Rows) -> int:
    return len(rows.env_id)


TestLearner = Learner.TestCase
TestLearner.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, phases=[Phase.reuse, Phase.generate, Phase.shrink]
)
