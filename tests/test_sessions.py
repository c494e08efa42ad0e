"""Leases of slots, and the rules of a session that no single message shows."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedrl.config import LearnerConfig
from seedrl.errors import InvalidMessage, Mismatch, NoCapacity
from seedrl.rows import ENDED, KNOWN_FLAGS, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.serving.lease import IN_FLIGHT
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import Session, SessionTable, session_seed
from seedrl.wire.codec import encode_step
from seedrl.wire.framing import serialize
from seedrl.wire.messages import MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES, ControlRequest, Hello
from tests.fakes import make_spec

ENVS = 4


def make_table(max_slots: int = 10, groups: int = 2, lockstep: bool = False) -> SessionTable:
    config = LearnerConfig(lockstep=lockstep)
    config.serving.max_slots = max_slots
    config.actors.envs = ENVS
    config.actors.groups = groups
    return SessionTable(config, lambda session_id: 100 + session_id, planned_seats(config))


def make_session() -> Session:
    session, _ = make_table().join(Hello("actor"))
    return session


def make_rows(env_id: list[int], flags: int | list[int]) -> Rows:
    n = len(env_id)
    return Rows(
        env_id=np.array(env_id, np.int32),
        observation=np.zeros((n, 2), np.float32),
        reward=np.zeros(n, np.float32),
        flags=np.broadcast_to(np.array(flags, np.uint8), n),
    )


def step(session: Session, env_id: list[int], flags: int | list[int]) -> None:
    """A row of each is admitted and answered."""
    rows = make_rows(env_id, flags)
    session.admit(rows)
    session.answered(rows)


# Leases.


def test_join_gives_each_session_its_own_slots_and_id() -> None:
    table = make_table()
    first, second = table.join(Hello("a"))[0], table.join(Hello("b"))[0]
    assert first.id != second.id
    assert first.lease.slots.tolist() == [0, 1, 2, 3]
    assert second.lease.slots.tolist() == [4, 5, 6, 7]
    assert list(table.open.values()) == [first, second]


def test_join_above_max_slots_is_refused_with_numbers_and_remedy() -> None:
    table = make_table(max_slots=10)
    table.join(Hello("a"))
    table.join(Hello("b"))
    with pytest.raises(NoCapacity, match=r"^8 of 10 slots are taken, 4 more are needed; raise serving.max_slots"):
        table.join(Hello("c"))
    assert len(table.open) == 2


def test_longest_message_is_what_the_rows_need_once_the_spaces_are_known() -> None:
    """A stranger cannot make a learner hold 64 MiB for each of its streams; only its user can open a socket's file."""
    table = make_table()
    assert table.longest_message == MIN_MESSAGE_BYTES
    table.agree(make_spec((2,)))
    assert table.longest_message == MIN_MESSAGE_BYTES
    private = make_table()
    private.config.listen = "unix:learner.sock"
    assert private.longest_message == MAX_MESSAGE_BYTES
    large, spec = make_table(groups=4), make_spec((1024, 1024), "uint8")
    large.agree(spec)
    rows = Rows(np.arange(ENVS), np.zeros((ENVS, 1024, 1024), np.uint8), np.zeros(ENVS), np.zeros(ENVS))
    assert len(serialize(encode_step(2**63, rows))) < large.longest_message < 1.01 * ENVS * 2**20
    huge = make_table(groups=4)
    huge.agree(make_spec((16, 1024, 1024), "uint8"))
    assert huge.longest_message == MAX_MESSAGE_BYTES


def test_join_of_a_closed_endpoint_is_refused_until_it_is_open_again() -> None:
    table = make_table()
    table.join(Hello("a"))
    assert table.obey(ControlRequest(open=False)) == list(table.open.values())
    with pytest.raises(
        NoCapacity, match=r"^this endpoint takes no new actors, and no other has room; see seedrl control"
    ):
        table.join(Hello("b"))
    table.obey(ControlRequest(open=True))
    table.join(Hello("b"))


def test_join_after_leave_reuses_slots_under_new_id() -> None:
    table = make_table(max_slots=8)
    first, _ = table.join(Hello("a"))
    second, _ = table.join(Hello("b"))
    table.leave(first)
    third, _ = table.join(Hello("c"))
    assert third.lease.slots.tolist() == first.lease.slots.tolist()
    assert third.id not in (first.id, second.id)
    assert (first.alive, second.alive, third.alive) == (False, True, True)
    assert (third.lease.expects == RESET).all()


def test_leave_twice_frees_slots_once() -> None:
    table = make_table(max_slots=ENVS)
    session, _ = table.join(Hello("a"))
    table.leave(session)
    table.leave(session)
    table.join(Hello("b"))
    with pytest.raises(NoCapacity):
        table.join(Hello("c"))


def test_join_lockstep_second_session_is_refused_until_first_left() -> None:
    table = make_table(lockstep=True)
    first, job = table.join(Hello("a"))
    assert job.group_size == job.num_envs == ENVS
    with pytest.raises(NoCapacity, match="lock-step"):
        table.join(Hello("b"))
    table.leave(first)
    assert table.join(Hello("c"))[0].alive


def test_join_job_tells_the_actor_everything() -> None:
    table = make_table(groups=2)
    table.config.env.id, table.config.env.options, table.config.env.wrappers = "Pong-v5", {"stack_num": 1}, ["m:W"]
    session, job = table.join(Hello("a"))
    assert (job.env_id, job.options, job.wrappers) == ("Pong-v5", {"stack_num": 1}, ["m:W"])
    assert (job.session_id, job.num_envs, job.group_size, job.seed) == (session.id, ENVS, 2, 100 + session.id)


def test_session_seed_differs_between_sessions_and_repeats_with_run_seed() -> None:
    def seeds(run_seed: int, earlier_processes: int = 0, rank: int = 0) -> list[int]:
        return [session_seed(run_seed, earlier_processes, session_id, rank) for session_id in range(1, 200)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2), *seeds(1, earlier_processes=7), *seeds(1, rank=1)}) == 4 * len(seeds(1))
    assert all(0 <= seed < 2**30 for seed in seeds(1))  # as the proto says; envpool takes an int32


# Rows.


def test_admit_first_rows_without_reset_are_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"^flags: expected RESET for environment 2, saw 0"):
        make_session().admit(make_rows([1, 2], [RESET, 0]))


def test_admit_reset_in_mid_episode_is_refused() -> None:
    session = make_session()
    step(session, [0, 1], RESET)
    with pytest.raises(InvalidMessage, match=r"^flags: expected no RESET for environment 1, saw 4"):
        session.admit(make_rows([0, 1], [0, RESET]))


@pytest.mark.parametrize("ending", [flags for flags in KNOWN_FLAGS if flags & ENDED])
def test_admit_row_after_end_needs_reset(ending: int) -> None:
    session = make_session()
    if not ending & RESET:
        step(session, [3], RESET)
    step(session, [3], ending)
    with pytest.raises(InvalidMessage, match="expected RESET for environment 3"):
        session.admit(make_rows([3], 0))
    session.admit(make_rows([3], RESET))


def test_admit_in_flight_is_refused_until_answered() -> None:
    session = make_session()
    first = make_rows([0, 1], RESET)
    session.admit(first)
    session.admit(make_rows([2], RESET))  # others are free to go
    with pytest.raises(InvalidMessage, match=r"^env_id: expected environments with no row in flight, saw 1 again"):
        session.admit(make_rows([3, 1], [RESET, 0]))
    session.answered(first)
    session.admit(make_rows([1, 0], 0))


def test_admit_environment_twice_in_one_step_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"^env_id: expected each environment once, saw one twice"):
        make_session().admit(make_rows([2, 1, 2], RESET))


# Spaces.


def test_agree_first_spec_wins_and_others_must_equal_it() -> None:
    table = make_table()
    table.agree(make_spec(shape=(2,)))
    table.agree(make_spec(shape=(2,)))
    assert table.spec.result(timeout=0) == make_spec(shape=(2,))
    for other in (make_spec(shape=(3,)), make_spec(dtype="float64"), make_spec(num_actions=9)):
        with pytest.raises(Mismatch, match=r"trains on observation float32\[2\], 3 actions; the actor has") as caught:
            table.agree(other)
        assert str(other) in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "side", "fits"),
    [(1, 32767, False), (2, 32767, True), (2, 32768, False)],  # the last leaves no room for the rest of a message
)
def test_agree_group_larger_than_a_message_is_refused(groups: int, side: int, fits: bool) -> None:
    table = make_table(groups=groups)
    spec = make_spec(shape=(side, 1024), dtype="uint8")
    rows = make_rows(list(range(ENVS // groups)), RESET)
    observation = np.zeros((len(rows.env_id), *spec.observation.shape), np.uint8)
    message = serialize(encode_step(2**64 - 1, rows._replace(observation=observation)))
    assert (len(message) <= MAX_MESSAGE_BYTES) == fits
    if fits:
        table.agree(spec)
    else:
        with pytest.raises(Mismatch, match=r"a message may have 67108864; raise actors\.groups on the learner"):
            table.agree(spec)
    assert table.spec.done() == fits


class Lives(RuleBasedStateMachine):
    """Sessions join, step, are answered and leave in any order."""

    MAX_SLOTS = 11  # room for two sessions and a remainder

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(self.MAX_SLOTS)
        self.sessions: list[Session] = []
        self.waiting: list[tuple[Session, Rows]] = []
        self.ids: set[int] = set()

    @rule()
    def join(self) -> None:
        if len(self.sessions) == self.MAX_SLOTS // ENVS:
            with pytest.raises(NoCapacity):
                self.table.join(Hello("one too many"))
            return
        session, job = self.table.join(Hello("actor"))
        assert job.session_id == session.id
        assert session.id not in self.ids
        self.ids.add(session.id)
        self.sessions.append(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        self.table.leave(session)
        assert not session.alive

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), ending=st.sampled_from([0, 0, TERMINATED, TRUNCATED]))
    def admit(self, data: st.DataObject, ending: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        env_id = data.draw(st.lists(st.integers(0, ENVS - 1), min_size=1, max_size=ENVS))
        rows = make_rows(env_id, [(session.lease.expects[env]) | ending for env in env_id])
        busy = {int(env) for owner, waiting in self.waiting if owner is session for env in waiting.env_id}
        if busy & set(env_id):
            with pytest.raises(InvalidMessage, match="in flight"):
                session.admit(rows)
        elif len(set(env_id)) < len(env_id):
            with pytest.raises(InvalidMessage, match="twice"):
                session.admit(rows)
            self.sessions.remove(session)
            self.table.leave(session)  # as the server does
        else:
            session.admit(rows)
            self.waiting.append((session, rows))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        """Answers come in any order, and to ended sessions as well."""
        session, rows = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        session.answered(rows)
        assert not (session.lease.expects[rows.env_id] == IN_FLIGHT).any()

    @invariant()
    def no_slot_is_leased_twice(self) -> None:
        leased = [int(slot) for session in self.table.open.values() for slot in session.lease.slots]
        assert len(leased) == len(set(leased)) == ENVS * len(self.sessions)
        assert set(leased) <= set(range(self.MAX_SLOTS))

    @invariant()
    def the_open_are_the_living(self) -> None:
        assert list(self.table.open.values()) == self.sessions
        assert all(session.alive for session in self.sessions)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
