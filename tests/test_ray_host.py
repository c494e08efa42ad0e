"""A process run on another's behalf, as in a Ray actor but without Ray: its words, its code, its end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from seedrl.launching.ray_host import RayHost, free_ports
from tests.integration.waiting import eventually, free_address

PROGRAM = "import os, sys; print('one'); print('two', os.environ['A']); print(os.getcwd()); sys.exit(5)"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module called `job`."""
    (tmp_path / "job.py").write_text(PROGRAM)
    monkeypatch.setenv("A", "ours")
    return tmp_path


def test_followed_process_is_heard_line_by_line_until_its_code(program: Path) -> None:
    said = list(RayHost("actor-1").run("job", [], {"A": "given"}, str(program), True))
    assert said == ["one", "two given", str(program), 5]


def test_other_process_is_heard_by_its_last_words(program: Path) -> None:
    assert list(RayHost("actor-1").run("job", [], {}, str(program), False)) == [str(program), 5]


def test_process_that_says_why_it_ends_is_heard_by_that_line_and_not_by_the_traceback(program: Path) -> None:
    (program / "job.py").write_text("print('up'); print('seedrl actor: my_env.py:3 in step: no'); print('Traceback')")
    assert list(RayHost("actor-1").run("job", [], {}, str(program), False)) == [
        "seedrl actor: my_env.py:3 in step: no",
        0,
    ]


def test_process_runs_elsewhere_if_the_directory_is_of_another_machine(program: Path) -> None:
    said = list(RayHost("actor-1").run("platform", [], {}, str(program / "absent"), True))
    assert said[-1] == 0


def test_process_that_is_stopped_gives_its_signal(program: Path) -> None:
    (program / "job.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    host = RayHost("actor-1")
    running = host.run("job", [], {}, str(program), True)
    assert next(running) == "up"
    host.stop(signal.SIGTERM)
    assert list(running) == [-signal.SIGTERM]


@pytest.mark.parametrize("is_running", [True, False])
def test_process_ends_at_once_with_its_host(program: Path, is_running: bool) -> None:
    """The process ends even if the host is killed between fork and exec."""
    (program / "job.py").write_text("import os, signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    code = "from seedrl.launching.ray_host import RayHost; list(RayHost('x').run('job', [], {}, '.', True))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=program) as host:
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
        child = eventually(lambda: children.read_text().split())[0]
        eventually(lambda: not is_running or b"-m\0job" in Path(f"/proc/{child}/cmdline").read_bytes())
        os.kill(host.pid, signal.SIGKILL)
        host.wait()
    eventually(lambda: not Path(f"/proc/{child}").exists())


def test_port_that_is_asked_for_is_kept_if_it_is_free() -> None:
    port = int(free_address().rpartition(":")[2])
    with socket.create_server(("", port)):
        other, another = free_ports([port, 0])
        assert len({port, other, another}) == 3
    assert free_ports([port]) == [port]
