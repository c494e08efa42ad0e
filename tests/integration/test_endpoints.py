"""Several endpoints and actors that are sent from one to the other, over real gRPC; nothing is lost uncounted."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from envs_server import session as actor_session
from seedrl.config import SecurityConfig
from seedrl.errors import ConfigError, LearnerLost, require
from seedrl.rows import Rows
from seedrl.serving import balance, protocol
from seedrl.serving.balance import LearnerEndpoint
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.channel import Link, ask_control
from seedrl.wire.messages import MAX_REDIRECTS, ORDERS, Command, Control, ControlRequest, MemberResult, Outcome
from tests.certificates import Certificates
from tests.chaos.proxy import Proxy
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands
from tests.integration.support import RawActor, RunningActor, RunningLearner, ScriptedLearner, SignedPool, make_rows
from tests.integration.waiting import DEADLINE, eventually, free_address

T = 4  # unroll_length of tiny_config
ENVS = 4


class Agreement:
    """Lets endpoints hear of each other ten times a second, as the ranks of a learner do in their own way."""

    def __init__(self) -> None:
        self._learners: list[RunningLearner] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
        self._thread.start()

    def add(self, *learners: RunningLearner) -> None:
        self._learners = [*(each for each in self._learners if not each.ended()), *learners]
        everybody = [each.address for each in self._learners]
        eventually(lambda: all(self._knows(each, everybody) for each in self._learners))

    def _knows(self, learner: RunningLearner, addresses: list[str]) -> bool:
        others = learner.service.inference.balance._seen.others
        return len(others) == len(addresses) - 1

    def _run(self) -> None:
        while not self._over.wait(0.1):
            there = [each.service.inference.balance for each in self._learners if not each.ended()]
            rows = [each.own() for each in there]
            for each in there:
                each.see(rows)

    def end(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE)


@pytest.fixture
def agreement() -> Iterator[Agreement]:
    agreement = Agreement()
    yield agreement
    agreement.end()


@pytest.fixture
def start_endpoint(start_learner: StartLearner, tmp_path: Path) -> StartLearner:
    """A learner with a run directory of its own."""
    names = iter("abcdefgh")

    def start(**settings: Any) -> RunningLearner:
        return start_learner(**{"run_dir": str(tmp_path / next(names)), **settings})

    return start


class SlowPool(SignedPool):
    """Environments that take their time, so that a round trip is the link's and not a queue's."""

    def recv(self) -> Rows:
        time.sleep(0.1)
        return super().recv()


def tell(learner: RunningLearner, do: str, actor: str = "", is_open: bool | None = None) -> int:
    """Return how many actors have done it. Raises ConfigError with the reason if one has refused."""
    order = ControlRequest(actor, command=ORDERS.get(do, Command.UNSPECIFIED), open=is_open)
    results = ask_control(Link(learner.address, SecurityConfig()), order, DEADLINE)
    for result in results:
        require(result.outcome is Outcome.done, f"{result.name}: {result.reason}")
    return len(results)


def move_all(learner: RunningLearner) -> int:
    return tell(learner, "move", is_open=False)


def names(learner: RunningLearner) -> set[str]:
    return {session.name for session in list(learner.service.inference.sessions.open.values())}


def is_served(actor: RunningActor, requests: int = 5) -> bool:
    return actor.requests >= requests


def start_and_wait(start_actor: StartActor, count: int, address: str, **settings: Any) -> list[RunningActor]:
    actors = []
    for _ in range(count):
        actor = start_actor(address, **settings)
        eventually(lambda actor=actor: is_served(actor, 1))
        actors.append(actor)
    return actors


def hush(learners: list[RunningLearner], actors: list[RunningActor]) -> None:
    """Nobody sends anything any more, and all that was sent has been answered."""
    for learner in learners:
        tell(learner, "pause")
    for learner in learners:
        eventually(lambda learner=learner: not learner.service.inference.batcher.waiting_rows)
    eventually(lambda: sent(actors) == counted(learners))


def sent(actors: list[RunningActor]) -> int:
    return sum(actor.actor.metrics.actor_steps for actor in actors)


def counted(learners: list[RunningLearner]) -> int:
    """Rows that were answered or dropped."""
    each = [learner.service.serving for learner in learners]
    return sum(metrics.rows + metrics.rows_dropped["session_ended"] for metrics in each)


def accounts_for_all(learner: RunningLearner) -> bool:
    """Return whether an endpoint that every actor has left has counted all rows and sessions."""
    metrics = learner.service.serving
    handed_over = T * metrics.unrolls_made + metrics.rows_dropped["partial_unroll"]
    ended = metrics.sessions_left + sum(metrics.sessions_evicted.values()) + moved(learner)
    return (
        metrics.rows == handed_over
        and metrics.sessions_joined == ended
        and not learner.service.inference.sessions.slots_taken
    )


def moved(learner: RunningLearner) -> int:
    redirected = learner.service.serving.sessions_redirected
    return redirected["drain"] + redirected["rebalance"]


# New actors.


@pytest.mark.parametrize("is_home_slow", [False, True])
@pytest.mark.long
def test_at_least_four_fifths_of_new_slots_go_elsewhere_if_an_endpoint_is_20_ms_away(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement, is_home_slow: bool
) -> None:
    listen = free_address()
    with Proxy(listen, delay=0.02) as link:
        slow = start_endpoint(listen=listen, ranks__advertise=link.address)
        fast = [start_endpoint(), start_endpoint()]
        for learner in (slow, *fast):  # one actor each, so that all are measured
            home = link.address if learner is slow else learner.address
            start_and_wait(start_actor, 1, home, make_pool=SlowPool)
        agreement.add(slow, *fast)
        eventually(lambda: all(each.service.inference.balance.own().round_trip for each in (slow, *fast)))
        home = link.address if is_home_slow else fast[0].address
        actors = start_and_wait(start_actor, 10, home, make_pool=SlowPool)
        at_slow = slow.service.inference.sessions.slots_taken - ENVS
        print(f"{at_slow} of {10 * ENVS} new slots at the slow endpoint")
        assert at_slow <= 0.2 * 10 * ENVS
        assert all(each.service.inference.sessions.slots_taken > 2 * ENVS for each in fast)
        assert not any(actor.wrong for actor in actors)


def test_actors_spread_over_endpoints_and_a_lone_learner_sends_nobody_away(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement
) -> None:
    first, second = start_endpoint(), start_endpoint()
    actors = start_and_wait(start_actor, 2, first.address)
    assert (len(names(first)), first.service.serving.sessions_redirected["balance"]) == (2, 0)
    agreement.add(first, second)
    actors += start_and_wait(start_actor, 4, first.address)
    assert len(names(second)) >= 2
    assert first.service.serving.sessions_redirected["balance"] == len(names(second))
    redirected = [actor for actor in actors if actor.actor.metrics.actor_redirects]
    assert len(redirected) == len(names(second))
    assert all(actor.says(f"goes to {second.address}, the learner says: ") for actor in redirected)
    assert not any(actor.wrong for actor in actors)
    hush([first, second], actors)


def test_reset_brings_an_actor_back_to_the_endpoint_it_is_at(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement
) -> None:
    """Other endpoints do not know the orders of this one, such as other options."""
    first, second = start_endpoint(), start_endpoint()
    agreement.add(first, second)
    actors = start_and_wait(start_actor, 4, first.address)
    before = names(first), names(second)
    assert all(before)
    for learner in (first, second):
        tell(learner, "reset")
    for actor in actors:
        eventually(lambda actor=actor: len(actor.pools) == 2 and is_served(actor))
    assert (names(first), names(second)) == before


# Draining.


@pytest.mark.parametrize(("transport", "shape"), [("message", (3,)), ("memory", (4096,))])
def test_drained_endpoint_has_nobody_at_once_and_everything_that_was_sent_is_counted(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement, transport: str, shape: tuple[int, ...]
) -> None:
    make_pool = partial(SignedPool, shape=shape)
    first, second = start_endpoint(), start_endpoint()
    actors = start_and_wait(start_actor, 4, first.address, make_pool=make_pool)
    agreement.add(first, second)
    updates = first.service.learning.updates
    eventually(lambda: first.service.learning.updates > updates)
    assert move_all(first) == 4
    assert not first.service.inference.sessions.open
    assert first.service.inference.sessions.slots_taken == 0
    eventually(lambda: len(names(second)) == 4 and all(is_served(actor) for actor in actors))
    assert first.service.serving.sessions_redirected["drain"] == 4
    late = start_and_wait(start_actor, 1, first.address, make_pool=make_pool)  # is sent on
    assert first.service.serving.sessions_redirected["closed"] == 1
    assert len(names(second)) == 5
    hush([first, second], [*actors, *late])
    assert accounts_for_all(first)
    metrics = first.service.serving
    assert metrics.received_bytes[transport] > max(metrics.received_bytes.values()) / 2
    assert metrics.actors_steps == metrics.rows + metrics.rows_dropped["session_ended"]  # last reports included
    assert metrics.rows_dropped["session_ended"] > 0
    assert metrics.sessions_left == 0
    assert not any(actor.wrong for actor in [*actors, *late])
    assert not any(actor.actor.metrics.actor_failures for actor in actors)


def test_opened_endpoint_takes_actors_again(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement
) -> None:
    first, second = start_endpoint(), start_endpoint()
    agreement.add(first, second)
    move_all(first)
    eventually(lambda: not second.service.inference.balance.has_others)  # it has heard of that
    with pytest.raises(ConfigError, match="move: expected another endpoint that is open and has room for 0 × 4"):
        move_all(second)
    start_and_wait(start_actor, 2, first.address)
    assert not names(first)
    assert tell(first, "open", is_open=True) == 0
    start_and_wait(start_actor, 2, first.address)
    assert len(names(first)) == 2


def test_one_actor_is_moved_and_the_others_stay(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement
) -> None:
    first, second = start_endpoint(), start_endpoint()
    actors = start_and_wait(start_actor, 3, first.address)
    agreement.add(first, second)
    assert tell(first, "move", actor="actor-1") == 1
    eventually(lambda: names(second) == {"actor-1"} and is_served(actors[1]))
    assert names(first) == {"actor-0", "actor-2"}
    assert first.service.inference.sessions.is_open
    with pytest.raises(ConfigError, match=r"actor: expected one that is connected \(actor-0, actor-2\), saw actor-1"):
        tell(first, "move", actor="actor-1")


@pytest.mark.long
def test_move_with_no_room_for_all_moves_nobody_and_says_so(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement, commands: Commands
) -> None:
    first = start_endpoint()
    actors = start_and_wait(start_actor, 3, first.address)
    words = (
        "move: expected another endpoint that is open and has room for 3 × 4 environments, saw none; no actor was moved"
    )
    with pytest.raises(ConfigError, match=words):
        move_all(first)
    agreement.add(first, start_endpoint(serving__max_slots=2 * ENVS))  # too small
    code, out, err = commands.run("control", "move", f"learner={first.address}")
    assert code == 2
    assert words in err
    assert out.startswith("told 0 actors, 3 refused: move, take no new actors\n  actor-0: refused; move: expected")
    assert names(first) == {"actor-0", "actor-1", "actor-2"}
    assert first.service.inference.sessions.is_open
    assert all(len(actor.pools) == 1 for actor in actors)
    code, out, err = commands.run("control", "move", "actor=actor-2", f"learner={first.address}")
    assert (code, out) == (0, "told 1 actor: move\n  actor-2: done\n"), err


def test_actor_that_does_not_leave_when_it_is_moved_holds_nothing(
    start_endpoint: StartLearner, agreement: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MOVE_SECONDS", 2.0)
    first, second = start_endpoint(serving__min_rows=8, serving__max_wait=600.0), start_endpoint()
    agreement.add(first, second)
    with RawActor(first.address) as raw:
        raw.join(redirects=1)
        raw.step(1, **make_rows([0, 1])._asdict())
        eventually(lambda: first.service.inference.batcher.waiting_rows == 2)
        assert tell(first, "move", actor="raw") == 1
        assert (first.service.inference.batcher.waiting_rows, first.service.inference.sessions.slots_taken) == (0, 0)
        control = raw.receive().control
        assert (control.command, control.address) == (pb.Control.COMMAND_REDIRECT, second.address)
        raw.step(2, **make_rows([2])._asdict())  # it had not heard of that
        eventually(lambda: first.service.serving.rows_dropped["session_ended"] == 3)
        assert first.service.inference.protocol.connections  # its stream is still there
        assert raw.status() == (grpc.StatusCode.OK, "")
    eventually(lambda: not first.service.inference.protocol.connections)
    assert accounts_for_all(first)


# Rebalancing, and restarts.


@pytest.mark.long
def test_endpoint_with_far_too_many_gives_some_to_a_new_one_and_then_nothing_moves(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "OVERLOAD_SECONDS", 1.0)
    monkeypatch.setattr(balance, "TOO_MUCH", 1.2)
    first = start_endpoint()
    actors = start_and_wait(start_actor, 5, first.address, make_pool=SlowPool)
    second = start_endpoint()
    agreement.add(first, second)
    eventually(lambda: len(names(second)) >= 1)
    eventually(lambda: all(is_served(actor) for actor in actors))
    looks = [len(names(first)) for _ in range(40) if not time.sleep(0.1)]
    assert looks == sorted(looks, reverse=True)  # nobody comes back
    assert moved(second) == 0
    assert len(names(first)) >= 2
    hush([first, second], actors)


@pytest.mark.long
def test_endpoints_restarted_one_after_the_other_train_on_and_lose_no_actor(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement, tmp_path: Path
) -> None:
    addresses = free_address(), free_address()

    def start(number: int) -> RunningLearner:
        return start_endpoint(listen=addresses[number], run_dir=str(tmp_path / f"run-{number}"))

    endpoints = [start(0), start(1)]
    agreement.add(*endpoints)
    actors = start_and_wait(start_actor, 4, addresses[0])
    for number in (1, 0):  # the one that actors were started with comes last
        old, other = endpoints[number], endpoints[1 - number]
        move_all(old)
        eventually(lambda other=other: len(names(other)) == 4)
        updates = other.service.learning.updates
        old.stop()
        assert accounts_for_all(old)
        eventually(lambda other=other, updates=updates: other.service.learning.updates > updates + 5)
        endpoints[number] = start(number)  # resumes, counters included
        agreement.add(endpoints[number])
    assert names(endpoints[0]) == set()
    assert len(names(endpoints[1])) == 4  # none of them has been without a learner
    hush(endpoints, actors)
    assert not any(actor.ended() or actor.wrong for actor in actors)
    assert not any(actor.actor.metrics.actor_failures for actor in actors)


# Hops.


def test_actor_that_has_followed_enough_is_served_or_refused_and_not_sent_on(
    start_endpoint: StartLearner, agreement: Agreement
) -> None:
    first, second = start_endpoint(), start_endpoint()
    agreement.add(first, second)
    move_all(first)
    for redirects in (0, 1, MAX_REDIRECTS - 1):
        with RawActor(first.address) as raw:
            raw.hello(redirects=redirects)
            assert raw.receive().control.address == second.address
            assert raw.status()[0] is grpc.StatusCode.OK
    with RawActor(first.address) as raw:
        raw.hello(redirects=MAX_REDIRECTS)
        code, words = raw.status()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert words.startswith("this endpoint takes no new actors")
    with RawActor(second.address) as raw:
        assert raw.join(redirects=MAX_REDIRECTS).num_envs == ENVS
    assert first.service.serving.sessions_redirected["closed"] == 3


def redirect_to(address: Callable[[], str]) -> Any:
    """A script of a learner that sends everybody on; keeps what actors say of redirects in `.seen`."""

    def script(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        seen.append(next(requests).hello.redirects)
        yield codec.encode_response(Control(Command.REDIRECT, "because", address()))

    seen: list[int] = []
    script.seen = seen  # type: ignore[attr-defined]
    return script


@pytest.mark.long
def test_learners_that_send_an_actor_round_in_circles_are_given_up_after_its_patience(start_actor: StartActor) -> None:
    there = ""
    one, other = redirect_to(lambda: there), redirect_to(lambda: here.address)
    with ScriptedLearner(one) as here, ScriptedLearner(other) as elsewhere:
        there = elsewhere.address
        actor = start_actor(here.address, patience=3.0)
        with pytest.raises(LearnerLost, match=rf"no learner at {here.address} for \d+ s"):
            actor.join()
        assert actor.says("sends it on to")
        assert set(one.seen) == {0, 2}
        assert set(other.seen) == {1, 3}
        assert here.sessions + elsewhere.sessions < 4 * 12  # four in a row, then a pause


@pytest.mark.parametrize("kind", ["dead", pytest.param("silent", marks=pytest.mark.long)])
def test_redirect_that_leads_nowhere_leads_home(
    start_endpoint: StartLearner, start_actor: StartActor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_session, "REDIRECTED_WELCOME_SECONDS", 2.0)
    learner = start_endpoint()
    busy = start_and_wait(start_actor, 2, learner.address)
    with contextlib.ExitStack() as stack:
        there = free_address()
        if kind == "silent":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts, and says nothing
            there = f"127.0.0.1:{listener.getsockname()[1]}"
        learner.service.inference.balance.see([LearnerEndpoint(there, free=64, slots=64, round_trip=0.0, is_open=True)])
        actor = start_actor(learner.address)
        eventually(lambda: is_served(actor))
        assert actor.says(f"goes to {there}, the learner says: ")
        assert actor.says(f"no stream to {there}")
        assert actor.actor.metrics.actor_redirects == 1
        assert actor.actor.metrics.actor_failures == 1
        assert len(names(learner)) == len(busy) + 1


def test_actor_whose_endpoint_dies_goes_home(
    start_endpoint: StartLearner, start_actor: StartActor, agreement: Agreement
) -> None:
    first, second = start_endpoint(), start_endpoint()
    actors = start_and_wait(start_actor, 1, first.address)
    agreement.add(first, second)
    tell(first, "move", actor="actor-0")
    eventually(lambda: names(second) == {"actor-0"} and is_served(actors[0]))
    second.stop()
    eventually(lambda: names(first) == {"actor-0"})
    assert not actors[0].wrong


# Whom an actor follows.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.1.2.3:50051", r"learner=10\.1\.2\.3:50051 is beyond this machine, and without TLS"),
        ("unix:/run/somebody.sock", "has a port, and unix:/run/somebody.sock is a file of this machine"),
    ],
)
def test_redirect_that_the_rules_of_security_forbid_is_refused_in_words_and_leads_home(
    start_actor: StartActor, address: str, words: str
) -> None:
    script = redirect_to(lambda: address)
    with ScriptedLearner(script) as learner:
        actor = start_actor(learner.address, patience=2.0)
        with pytest.raises(LearnerLost):
            actor.join()
    (said,) = [line for line in actor.said if "where it may not go" in line]
    assert re.search(words, said)
    assert script.seen[:2] == [0, MAX_REDIRECTS]  # so that an honest one serves it
    assert not actor.pools


@pytest.mark.parametrize("address", ["dns://10.0.0.1/learner:50051", "localhost", "ipv4:127.0.0.1:1,127.0.0.1:2", ""])
def test_redirect_to_what_is_no_address_ends_the_actor(start_actor: StartActor, address: str) -> None:
    with ScriptedLearner(redirect_to(lambda: address)) as learner:
        actor = start_actor(learner.address)
        with pytest.raises(codec.InvalidMessage, match="address: expected HOST:PORT or unix:PATH, saw "):
            actor.join()


class Secured:
    """An endpoint with TLS and an actor there that can be sent elsewhere, whether that is wise or not."""

    def __init__(self, start_endpoint: StartLearner, start_actor: StartActor, certificates: Certificates) -> None:
        self._security = certificates.actor
        self.learner = start_endpoint(security=certificates.learner)
        self.actor = start_actor(self.learner.address, security=certificates.actor)
        eventually(self.has_it)

    def has_it(self) -> bool:
        return names(self.learner) == {"actor-0"} and is_served(self.actor)

    def send_to(self, address: str) -> None:
        row = LearnerEndpoint(address, free=64, slots=64, round_trip=0.0, is_open=True)
        self.learner.service.inference.balance.see([row])
        order = ControlRequest("actor-0", command=Command.REDIRECT)
        assert ask_control(Link(self.learner.address, self._security), order, DEADLINE) == [MemberResult("actor-0")]


@pytest.fixture
def secured(start_endpoint: StartLearner, start_actor: StartActor, certificates: Certificates) -> Secured:
    return Secured(start_endpoint, start_actor, certificates)


def test_actor_with_tls_follows_to_an_endpoint_of_its_ca(
    secured: Secured, start_endpoint: StartLearner, certificates: Certificates
) -> None:
    other = start_endpoint(security=certificates.learner)
    secured.send_to(other.address)
    eventually(lambda: names(other) == {"actor-0"} and is_served(secured.actor))
    assert not secured.actor.wrong


def test_actor_with_tls_says_nothing_to_a_server_without(secured: Secured) -> None:
    heard: list[Any] = []

    def listen(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        heard.append(next(requests))
        yield codec.encode_response(Control(Command.END, "mine now"))

    with ScriptedLearner(listen) as plain:
        secured.send_to(plain.address)
        eventually(lambda: secured.actor.says(f"no connection to the learner at {plain.address}: it does not use TLS"))
        eventually(secured.has_it)
    assert heard == []


def test_actor_with_tls_does_not_stay_with_a_certificate_for_another_name(
    secured: Secured, start_endpoint: StartLearner, certificates: Certificates
) -> None:
    stranger = start_endpoint(security=replace(certificates.elsewhere, token_file=certificates.token))
    secured.send_to(stranger.address)
    refused = f"no connection to the learner at {stranger.address}: its certificate is refused"
    eventually(lambda: secured.actor.says(refused))
    eventually(secured.has_it)
    assert stranger.service.serving.sessions_joined == 0
    assert stranger.service.serving.sessions_refused["unauthenticated"] == 0  # no call came as far as that
