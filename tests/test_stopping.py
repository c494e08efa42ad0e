"""A request to stop and what comes of it: the first request counts, and a failure outweighs it."""

import os
import signal

from seedrl.errors import RankLost, ThreadDied
from seedrl.run.stopping import Stop, stop_on_signals


def test_stop_takes_the_first_request_and_calls_on_stop_once() -> None:
    calls: list[str] = []
    stop = Stop(on_stop=lambda: calls.append("stopped"))
    stop.ask("done", "enough")
    stop.ask("interrupted", "too late")
    stop.fail(ThreadDied("much later"))
    assert calls == ["stopped"]


def test_stop_that_fails_first_calls_on_stop() -> None:
    calls: list[str] = []
    Stop(on_stop=lambda: calls.append("stopped")).fail(ThreadDied("gone"))
    assert calls == ["stopped"]


def test_failure_after_a_requested_stop_makes_it_a_failure() -> None:
    stop = Stop()
    stop.ask("interrupted", "SIGTERM")
    failure = ThreadDied("thread learner died")
    stop.fail(failure)
    assert (stop.status, stop.reason, stop.failure) == ("failed", "thread learner died", failure)


def test_stop_keeps_its_first_failure() -> None:
    stop, first = Stop(), ThreadDied("the cause")
    stop.fail(first)
    stop.fail(ThreadDied("a consequence"))
    stop.obey("failed", "rank 1: another consequence")
    assert stop.failure is first


def test_stop_obeys_a_rank_that_fails_although_it_was_asked_to_stop_before() -> None:
    stop = Stop()
    stop.ask("interrupted", "SIGTERM")
    stop.obey("failed", "rank 1: broken")
    assert isinstance(stop.failure, RankLost)


def test_signal_that_was_blocked_when_the_process_started_stops_it() -> None:
    """The processes that Ray's threads start have SIGINT blocked."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    stop = Stop()
    try:
        stop_on_signals(stop, say=lambda words: None)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.reason == "Interrupted by SIGINT"
