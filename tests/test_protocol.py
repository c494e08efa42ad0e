"""The session protocol over a fake stream: who is admitted, refused, redirected or evicted, and what is logged."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from seedrl.config import LearnerConfig
from seedrl.errors import InvalidMessage, NoCapacity, Refused, Superseded, TooLate
from seedrl.metrics import ServingMetrics
from seedrl.rows import RESET
from seedrl.serving import protocol as rules
from seedrl.serving import quarantine
from seedrl.serving.balance import OVERLOAD_SECONDS, Balance, LearnerEndpoint
from seedrl.serving.batcher import Batcher
from seedrl.serving.protocol import SessionProtocol
from seedrl.serving.quarantine import Quarantine
from seedrl.serving.refusals import LINES
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.wire import codec
from seedrl.wire.messages import (
    MAX_REDIRECTS,
    Act,
    ActorMessage,
    Command,
    Control,
    ControlRequest,
    Hello,
    LearnerMessage,
    MemberResult,
    Outcome,
    Ready,
    Report,
    StepParts,
    Welcome,
)
from tests.fakes import FakeClock, make_spec
from tests.integration.waiting import DEADLINE
from tests.rig import make_rows

ENVS = 4
SPEC = make_spec()


class FakeStream:
    """Both ends of a stream: `send` and `end` are the actor's, the four others the learner's."""

    def __init__(self, *messages: ActorMessage | Exception) -> None:
        self.written: list[LearnerMessage] = []
        self.error: Exception | None = None  # that it was aborted with
        self._incoming: asyncio.Queue[ActorMessage | Exception | None] = asyncio.Queue()
        for message in messages:
            self.send(message)

    def send(self, message: ActorMessage | Exception) -> None:
        self._incoming.put_nowait(message)

    def end(self) -> None:
        self._incoming.put_nowait(None)

    async def read(self) -> ActorMessage | None:
        message = await self._incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: LearnerMessage) -> None:
        self.written.append(message)

    async def abort(self, error: Exception) -> None:
        self.error = error

    def peer(self) -> str:
        return "fake:1"


class Endpoint:
    """A protocol with all it stands on but inference: `serve` answers what waits in the batcher."""

    def __init__(self, **serving: Any) -> None:
        config = LearnerConfig()
        config.actors.envs, config.actors.groups, config.serving.max_slots = ENVS, 1, 2 * ENVS
        for name, value in serving.items():
            setattr(config.serving, name, value)
        self.said: list[str] = []
        self.left: list[Session] = []
        self.metrics = ServingMetrics()
        self.batcher: Batcher[Request] = Batcher(max_rows=64, min_rows=1, max_wait=0.0)
        self.sessions = SessionTable(config, lambda session: session, planned_seats(config), on_leave=self.left.append)
        self.clock = FakeClock()  # of the balance
        self.balance = Balance(self.sessions, clock=self.clock)
        self.protocol = SessionProtocol(
            config, self.sessions, self.balance, self.batcher, self.metrics, self.said.append
        )

    def serve(self, stream: FakeStream) -> "asyncio.Task[None]":
        return asyncio.create_task(self.protocol.serve(stream))

    def answer(self) -> None:
        requests = self.batcher.take() or []
        self.protocol.answer([(request, np.full(request.rows, 2, np.int32)) for request in requests])


async def eventually(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(DEADLINE):
        while not (value := condition()):
            await asyncio.sleep(0)
    return value


def run(test: Awaitable[None]) -> None:
    asyncio.run(test)  # type: ignore[arg-type]


def step(request_id: int = 1, env_id: tuple[int, ...] = (0, 1, 2, 3), flags: int = RESET) -> StepParts:
    rows = make_rows(np.zeros((len(env_id), 2), np.float32), flags, env_id)
    message = codec.parse_request(codec.serialize_request(codec.encode_step(request_id, rows)))
    assert isinstance(message, StepParts)
    return message


# A session.


def test_session_is_welcomed_stepped_answered_and_leaves_nothing_behind() -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step(7))
        session = endpoint.serve(stream)
        await eventually(lambda: endpoint.batcher.waiting_rows == ENVS)
        endpoint.answer()
        await eventually(lambda: len(stream.written) == 2)
        stream.end()
        await session
        welcome, act = stream.written
        assert isinstance(welcome, Welcome)
        assert isinstance(act, Act)
        assert (list(act.request_id), codec.decode_act(act, SPEC, ENVS).tolist()) == ([7], [2] * ENVS)
        assert (stream.error, endpoint.sessions.open, endpoint.protocol.connections) == (None, {}, {})
        assert endpoint.said == ["learner: a joined with 4 environments", "learner: a left"]
        assert [left.name for left in endpoint.left] == ["a"]

    run(test())


def test_answers_of_one_batch_are_one_message_for_each_session() -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step(1, (0, 1)), step(2, (2, 3)))
        session = endpoint.serve(stream)
        await eventually(lambda: endpoint.batcher.waiting_rows == ENVS)
        endpoint.answer()
        await eventually(lambda: len(stream.written) == 2)
        assert list(stream.written[1].request_id) == [1, 2]  # type: ignore[union-attr]
        stream.end()
        await session

    run(test())


def test_stream_that_ends_before_hello_is_no_session() -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream()
        stream.end()
        await endpoint.serve(stream)
        assert (stream.error, stream.written) == (None, [])
        assert endpoint.metrics.sessions_joined == 0
        assert endpoint.said == [
            "learner: an actor (fake:1) left before its Hello, or sent a message of more than 67108864 bytes"
        ]

    run(test())


@pytest.mark.parametrize(
    ("silent", "words"), [(0.2, "0.2 s after its last message"), (12.0, "an actor has to answer pings within 10 s")]
)
def test_session_whose_connection_breaks_is_logged_with_the_reasons_there_can_be(silent: float, words: str) -> None:
    """An actor that answers no ping for ten seconds sees RESOURCE_EXHAUSTED; the log has to name the rule."""

    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step(7))
        session = endpoint.serve(stream)
        await eventually(lambda: endpoint.batcher.waiting_rows == ENVS)
        next(iter(endpoint.sessions.open.values())).traffic.heard -= silent
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        assert endpoint.said[-1].startswith("learner: a left: its call was cancelled or its connection closed")
        assert words in endpoint.said[-1]
        assert endpoint.metrics.sessions_left == 1

    run(test())


# Refusals.


def test_request_id_in_flight_twice_is_refused_and_may_be_used_again_once_answered() -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step(7, (0, 1)))
        session = endpoint.serve(stream)
        await eventually(lambda: endpoint.batcher.waiting_rows == 2)
        endpoint.answer()
        stream.send(step(7, (2, 3)))
        await eventually(lambda: endpoint.batcher.waiting_rows == 2)
        stream.send(step(7, (0, 1), flags=0))
        await session
        assert str(stream.error) == "request_id: expected one of no request in flight, saw 7 again"

    run(test())


def test_session_that_sends_an_absurd_number_is_ended_by_name_and_counted_and_the_others_continue() -> None:
    """One finite number, 1e20, used to end the run."""

    async def test() -> None:
        endpoint, good, bad = Endpoint(), FakeStream(Hello("good"), Ready(SPEC)), FakeStream(Hello("bad"), Ready(SPEC))
        sessions = [endpoint.serve(good), endpoint.serve(bad)]
        rows = make_rows(np.full((4, 2), 1e20, np.float32), RESET, (0, 1, 2, 3))
        message = codec.parse_request(codec.serialize_request(codec.encode_step(1, rows)))
        bad.send(message)
        await sessions[1]
        assert "serving.max_observation" in str(bad.error)
        assert endpoint.said[-1].startswith("learner: ended the session of bad (fake:1): observation: expected numbers")
        assert endpoint.metrics.sessions_evicted["invalid_message"] == 1
        assert endpoint.batcher.waiting_rows == 0
        good.send(step(1))
        await eventually(lambda: endpoint.batcher.waiting_rows == ENVS)
        good.end()
        await sessions[0]
        assert good.error is None

    run(test())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([step()], "message: expected hello, saw step"),
        ([Ready(SPEC)], "message: expected hello, saw ready"),
        ([Hello("a"), Hello("a")], "message: expected ready, saw hello"),
        ([Hello("a"), step()], "message: expected ready, saw step"),
        ([Hello("a"), Ready(SPEC), Ready(SPEC)], "message: expected step or report, saw ready"),
    ],
)
def test_stream_with_messages_out_of_order_is_refused_by_name(messages: list[ActorMessage], words: str) -> None:
    """B2, B6."""

    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(*messages)
        await endpoint.serve(stream)
        assert isinstance(stream.error, InvalidMessage)
        assert str(stream.error) == words
        assert not endpoint.sessions.open

    run(test())


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([Report(env_seconds=0.5), Report(env_seconds=0.4)], "report.env_seconds: expected 0.5 to .*, saw 0.4"),
        ([Report(steps=1)], "report.steps"),
        ([Report(requests=1)], "report.requests"),
        ([Report(env_seconds=1e9)], "report.env_seconds"),
        ([Report(wait_seconds=1e9)], "report.wait_seconds"),
        ([Report(round_trip_seconds=0.1)], "report.round_trip_seconds"),
        ([Report(cpu_seconds=1e9)], "report.cpu_seconds"),
        ([Report(reconnects=2_000_000)], "report.reconnects"),
    ],
    ids=["shrinks", *Report._fields[:1], *Report._fields[3:4], *Report._fields[1:3], *Report._fields[4:]],
)
def test_report_that_cannot_be_true_is_refused_and_not_counted(reports: list[Report], words: str) -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), *reports)
        await endpoint.serve(stream)
        with pytest.raises(InvalidMessage, match=words):
            raise stream.error or AssertionError("it was not refused")
        assert endpoint.metrics.actors_env_seconds < 1e6

    run(test())


def test_refusals_are_counted_by_reason_before_and_after_joining() -> None:
    async def test() -> None:
        endpoint = Endpoint()
        for messages in ([step()], [Hello("a"), Ready(SPEC), Hello("a")]):
            await endpoint.serve(FakeStream(*messages))
        for counts in (endpoint.metrics.sessions_refused, endpoint.metrics.sessions_evicted):
            assert {reason: count for reason, count in counts.items() if count} == {"invalid_message": 1}
        assert (endpoint.metrics.sessions_joined, endpoint.metrics.sessions_left) == (1, 0)

    run(test())


def test_refused_actors_are_named_with_their_address_and_logged_at_a_bounded_rate() -> None:
    async def test() -> None:
        endpoint = Endpoint()
        await endpoint.serve(FakeStream(step()))
        await endpoint.serve(FakeStream(Hello("bad"), step()))
        assert endpoint.said == [
            "learner: refused an actor (fake:1): message: expected hello, saw step",
            "learner: refused bad (fake:1): message: expected ready, saw step",
        ]
        for _ in range(1000):
            await endpoint.serve(FakeStream(step()))
        assert len(endpoint.said) == LINES
        assert endpoint.metrics.sessions_refused["invalid_message"] == 1001

    run(test())


def test_session_that_never_became_ready_is_said_to_have_left_before() -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"))
        stream.end()
        await endpoint.serve(stream)
        (said,) = endpoint.said
        assert said.startswith("learner: a (fake:1) left before its Ready, or sent a message of more than")
        assert endpoint.metrics.sessions_left == 1

    run(test())


def test_failure_of_our_own_is_logged_and_ends_the_stream_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step())
        monkeypatch.setattr(endpoint.batcher, "submit", lambda request: 1 / 0)
        await endpoint.serve(stream)
        assert isinstance(stream.error, ZeroDivisionError)
        assert any("a session of a (fake:1) failed: ZeroDivisionError" in line for line in endpoint.said)
        assert endpoint.metrics.sessions_evicted["internal"] == 1
        assert not endpoint.sessions.open

    run(test())


def test_hello_and_ready_that_do_not_come_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        for limit, messages, word in (("HELLO_SECONDS", [], "hello"), ("READY_SECONDS", [Hello("a")], "ready")):
            monkeypatch.setattr(rules, limit, 0.001)
            stream = FakeStream(*messages)
            await Endpoint().serve(stream)
            assert isinstance(stream.error, TooLate)
            assert f"expected {word} within" in str(stream.error)
            monkeypatch.undo()

    run(test())


def test_streams_and_slots_above_their_limits_are_refused() -> None:
    async def test() -> None:
        endpoint = Endpoint(max_slots=ENVS)
        first, second = FakeStream(Hello("a")), FakeStream(Hello("b"))
        session = endpoint.serve(first)
        await eventually(lambda: first.written)
        await endpoint.serve(second)
        assert isinstance(second.error, NoCapacity)
        silent = [FakeStream() for _ in range(ENVS + rules.SPARE_STREAMS - 1)]
        waiting = [endpoint.serve(stream) for stream in silent]
        last = FakeStream()
        await endpoint.serve(last)
        assert "streams are open" in str(last.error)
        for stream in (first, *silent):
            stream.end()
        await asyncio.gather(session, *waiting)

    run(test())


# Sessions that the learner ends.


def test_newer_session_of_a_process_evicts_the_older_before_it_takes_slots() -> None:
    """B7."""

    async def test() -> None:
        endpoint = Endpoint(max_slots=ENVS)
        old, new = FakeStream(Hello("a", instance="i", epoch=1), Ready(SPEC), step()), FakeStream()
        session = endpoint.serve(old)
        await eventually(lambda: endpoint.batcher.waiting_rows)
        new.send(Hello("a", instance="i", epoch=2))
        newer = endpoint.serve(new)
        await session
        assert isinstance(old.error, Superseded)
        assert isinstance(await eventually(lambda: new.written and new.written[0]), Welcome)
        assert endpoint.batcher.waiting_rows == 0
        assert endpoint.metrics.rows_dropped["session_ended"] == ENVS
        new.end()
        await newer

    run(test())


def test_silent_actor_is_evicted_and_the_reason_is_the_silence() -> None:
    """A2."""

    async def test() -> None:
        endpoint, stream = Endpoint(max_silence=0.01), FakeStream(Hello("a"), Ready(SPEC))
        await endpoint.serve(stream)
        assert isinstance(stream.error, TooLate)
        assert endpoint.metrics.sessions_evicted["too_late"] == 1

    run(test())


def test_control_reaches_the_sessions_that_it_names() -> None:
    async def test() -> None:
        endpoint = Endpoint()
        streams = [FakeStream(Hello(name), Ready(SPEC)) for name in ("a", "b")]
        sessions = [endpoint.serve(stream) for stream in streams]
        await eventually(lambda: all(stream.written for stream in streams) and len(endpoint.said) == 2)
        pause = ControlRequest("a", command=Command.PAUSE)
        assert endpoint.protocol.control(pause, "fake:2") == [MemberResult("a")]
        await eventually(lambda: len(streams[0].written) == 2)
        assert streams[0].written[1] == Control(Command.PAUSE, "Asked to: pause")
        assert [session.is_paused for session in endpoint.sessions.open.values()] == [True, False]
        with pytest.raises(Refused, match=r"actor: expected one that is connected \(a, b\), saw c"):
            endpoint.protocol.control(ControlRequest("c", command=Command.PAUSE), "fake:2")
        for stream in streams:
            stream.end()
        await asyncio.gather(*sessions)

    run(test())


# Moving.


class MovableEndpoint(Endpoint):
    """An endpoint that is full while another one is empty."""

    async def joined(self, *hellos: Hello) -> "list[tuple[FakeStream, asyncio.Task[None]]]":
        found = []
        for hello in hellos:
            stream = FakeStream(hello, Ready(SPEC))
            found.append((stream, self.serve(stream)))
            await eventually(lambda: len(self.said) == len(found))
        self.see()
        return found

    def see(self) -> None:
        self.balance.address = "here:1"
        self.balance.see([self.balance.own(), LearnerEndpoint("there:1", 1000, 1000, 0.0, True)])

    def is_overloaded_for(self, seconds: float) -> None:
        for _ in range(2):
            self.see()
            self.protocol.move_one_if_overloaded()
            self.clock.advance(seconds)


MOVED = Control(Command.REDIRECT, "this endpoint has too many actors", "there:1")


def test_balancing_moves_the_newest_session_that_follows_redirects() -> None:
    """Rule 12: a client that counts three redirects is never redirected."""

    async def test() -> None:
        endpoint = MovableEndpoint()
        follows, stays = await endpoint.joined(Hello("follows"), Hello("stays", redirects=MAX_REDIRECTS))
        endpoint.is_overloaded_for(OVERLOAD_SECONDS)
        await eventually(lambda: MOVED in follows[0].written)
        assert [session.name for session in endpoint.sessions.open.values()] == ["stays"]
        endpoint.is_overloaded_for(OVERLOAD_SECONDS)
        assert endpoint.metrics.sessions_redirected["rebalance"] == 1
        for stream, session in (follows, stays):
            stream.end()
            await session
        assert MOVED not in stays[0].written

    run(test())


@pytest.mark.parametrize("actor", ["stays", ""])
def test_control_move_of_a_session_that_does_not_follow_redirects_is_refused_in_words(actor: str) -> None:
    async def test() -> None:
        endpoint = MovableEndpoint()
        follows, stays = await endpoint.joined(Hello("follows"), Hello("stays", redirects=MAX_REDIRECTS))
        order = ControlRequest(actor, command=Command.REDIRECT, open=None if actor else False)
        results = endpoint.protocol.control(order, "fake:2")
        assert {result.name: result.outcome for result in results} == dict.fromkeys(
            [actor] if actor else ["follows", "stays"], Outcome.refused
        )
        assert results[0].reason.startswith("move: expected actors that follow redirects, saw stays with 3 in")
        assert len(endpoint.sessions.open) == 2
        assert endpoint.sessions.is_open
        move = ControlRequest("follows", command=Command.REDIRECT)
        assert endpoint.protocol.control(move, "fake:2") == [MemberResult("follows")]
        for stream, session in (follows, stays):
            stream.end()
            await session
        assert follows[0].written[-1] == Control(Command.REDIRECT, "Asked to: move", "there:1")
        assert len(stays[0].written) == 1  # Welcome

    run(test())


# Actors that break a rule again and again.


def broken(instance: str, epoch: int = 1) -> FakeStream:
    return FakeStream(Hello("a", instance=instance, epoch=epoch), Ready(SPEC), step(flags=0))


def test_next_session_of_an_instance_that_broke_a_rule_waits_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor with the same mistake in every session used to take and free slots as fast as it could join."""
    monkeypatch.setattr(quarantine, "SECONDS", 1e6)

    async def test() -> None:
        endpoint, first = Endpoint(), broken("x")
        await endpoint.serve(first)
        assert isinstance(first.error, InvalidMessage)
        again, other, nameless = broken("x", epoch=2), broken("y"), broken("")
        waiting = endpoint.serve(again)
        for stream in (other, nameless, broken("")):
            await endpoint.serve(stream)
            assert isinstance(stream.error, InvalidMessage)
        assert (again.written, waiting.done(), endpoint.metrics.sessions_joined) == ([], False, 4)
        goodbye = Control(Command.END, "done")
        endpoint.protocol.drain(goodbye)
        await waiting
        assert (again.written, again.error) == ([goodbye], None)

    run(test())


def test_next_session_of_an_instance_that_broke_a_rule_is_welcome_after_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "SECONDS", 0.01)

    async def test() -> None:
        endpoint = Endpoint()
        for epoch in (1, 2):
            await endpoint.serve(broken("x", epoch))
        assert endpoint.metrics.sessions_joined == 2

    run(test())


def test_quarantine_ends_by_itself_and_remembers_a_bounded_number_of_instances() -> None:
    clock = FakeClock()
    waits = Quarantine(clock)
    waits.impose("x")
    assert (waits.seconds_left("x"), waits.seconds_left("y")) == (quarantine.SECONDS, 0.0)
    clock.advance(quarantine.SECONDS - 1)
    assert waits.seconds_left("x") == 1.0
    clock.advance(2)
    assert waits.seconds_left("x") == 0.0
    for number in range(quarantine.MOST + 1):
        waits.impose(str(number))
    assert len(waits._until) == quarantine.MOST
    assert (waits.seconds_left("0"), waits.seconds_left("1")) == (0.0, quarantine.SECONDS)
    waits.impose("")
    assert waits.seconds_left("") == 0.0


# Goodbye.


def test_goodbye_reaches_open_sessions_and_later_streams_and_loses_nothing() -> None:
    """Unrolls and rows that are unfinished at the end of a run were not lost by a session."""

    async def test() -> None:
        endpoint, stream = Endpoint(), FakeStream(Hello("a"), Ready(SPEC), step())
        session = endpoint.serve(stream)
        await eventually(lambda: endpoint.batcher.waiting_rows)
        goodbye = Control(Command.END, "done")
        endpoint.protocol.drain(goodbye)
        late = FakeStream(Hello("b"))
        await endpoint.serve(late)
        assert late.written == [goodbye]
        ended = asyncio.create_task(endpoint.protocol.say_goodbye())
        await eventually(lambda: stream.written[-1] == goodbye)
        stream.end()
        await asyncio.gather(session, ended)
        assert endpoint.left == []
        assert sum(endpoint.metrics.rows_dropped.values()) == 0
        assert not any("left" in line for line in endpoint.said)

    run(test())
