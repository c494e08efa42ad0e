"""The guard against leftovers: it sees each kind of thing, names test and thing, and waits for what ends by itself."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests import leftovers
from tests.leftovers import OF_A_FILE, OF_A_TEST, Watch

pytest_plugins = ["pytester"]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE", 0.0)


@contextmanager
def thread_left() -> Iterator[str]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="forgotten")
    thread.start()
    yield "thread 'forgotten'"
    over.set()
    thread.join()


@contextmanager
def process_left() -> Iterator[str]:
    with subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # from now on it has a command line
        yield f"child process {process.pid} (cat)"


@contextmanager
def process_not_waited_for() -> Iterator[str]:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield f"child process {process.pid} (ended, but not waited for)"


@contextmanager
def variable_set() -> Iterator[str]:
    os.environ["FORGOTTEN"] = "3"
    yield "FORGOTTEN=3"
    del os.environ["FORGOTTEN"]


@contextmanager
def variable_taken() -> Iterator[str]:
    home = os.environ.pop("HOME")
    yield f"no HOME={home}"
    os.environ["HOME"] = home


@contextmanager
def handler_set() -> Iterator[str]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield "a handler of SIGUSR1"
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def orphan_left() -> Iterator[str]:
    """The parent of the process has ended, so it is nobody's child that pytest knows."""
    reading, writing = os.pipe()
    command = ["sh", "-c", "exec 3<&0; cat <&3 > /dev/null & echo $!"]  # sh would give it /dev/null to read
    done = subprocess.run(command, stdin=reading, stdout=subprocess.PIPE, text=True, check=True)
    os.close(reading)
    yield f"process {int(done.stdout)} (cat)"
    os.close(writing)


@contextmanager
def socket_left() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"a socket that listens on port {listener.getsockname()[1]}"


Leave = Callable[[], AbstractContextManager[str]]
LEFT_BY_TESTS = [thread_left, process_left, process_not_waited_for, variable_set, variable_taken, handler_set]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("leave", LEFT_BY_TESTS)
def test_watch_of_a_test_names_what_is_new_and_nothing_once_it_is_gone(leave: Leave) -> None:
    watch = Watch(OF_A_TEST)
    assert watch.left() == []
    with leave() as words:
        assert words in watch.left()
        assert Watch(OF_A_TEST).left() == []  # the next test does not answer for it
    assert watch.left() == []


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("leave", [thread_left, process_left, orphan_left, socket_left])
def test_watch_of_a_file_names_what_is_new(leave: Leave) -> None:
    watch = Watch(OF_A_FILE)
    with leave() as words:
        assert words in watch.left()


def test_watch_waits_for_what_ends_by_itself() -> None:
    watch = Watch(OF_A_TEST)
    thread = threading.Timer(0.05, lambda: None)
    thread.start()
    assert watch.left() == []
    assert not thread.is_alive()


@pytest.mark.usefixtures("_impatient")
def test_test_that_leaves_a_thread_fails_by_name_and_the_next_one_passes(pytester: pytest.Pytester) -> None:
    over = threading.Event()
    pytester.makepyfile(
        """
        import threading

        def test_leaves(over):
            threading.Thread(target=over.wait, name="forgotten").start()

        def test_is_clean():
            pass
        """
    )

    class Over:
        @pytest.fixture
        def over(self) -> threading.Event:
            return over

    result = pytester.inline_run("-p", "tests.leftovers", "-p", "no:xdist", plugins=[Over()])
    over.set()
    passed, _, failed = result.listoutcomes()
    assert len(passed) == 2
    assert [report.nodeid.rpartition("::")[2] for report in failed] == ["test_leaves", "test_is_clean"]
    assert "::test_leaves left behind: thread 'forgotten'" in failed[0].longreprtext
