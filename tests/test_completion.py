"""Tab completion: the words that are offered, and bash and zsh themselves, driven through a terminal."""

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedrl.commandline.completion import SCRIPTS, completions
from seedrl.commandline.main import main
from seedrl.commands import COMMANDS
from tests.integration.waiting import DEADLINE
from tests.programs import missing

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("st", {"status"}),
        ("run env=po", {"env=pong"}),
        ("-m run env=po", {"env=pong"}),
        ("run env=pong algorithm.opt", {"algorithm.optimizer=", "algorithm.options."}),
        ("run algorithm.optimizer=", {"algorithm.optimizer=adam", "algorithm.optimizer=rmsprop"}),
        ("run algorithm.name=p", {"algorithm.name=ppo", "algorithm.name=pqn"}),
        ("run lockstep=", {"lockstep=true", "lockstep=false"}),
        ("run algorithm.on_policy=n", {"algorithm.on_policy=null"}),
        ("run exper", {"experiment="}),
        ("run +env.opt", {"+env.options."}),
        ("run --multi", {"--multirun"}),
        ("status --js", {"--json"}),
        ("run --help ", {"all"}),
        ("bench comp", {"compare"}),
        ("run xyzzy", set()),
    ],
)
def test_completion_offers_what_could_stand_there(line: str, expected: set[str]) -> None:
    assert set(completions(COMMANDS, line.split(" "))) == expected


def test_completion_of_an_empty_line_offers_every_command() -> None:
    assert set(COMMANDS) < set(completions(COMMANDS, [""]))


def test_completion_offers_directories_where_a_path_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert list(completions(COMMANDS, ["run", "run_dir=ru"])) == ["run_dir=runs/"]
    assert list(completions(COMMANDS, ["run", "run_dir=runs/"])) == ["run_dir=runs/first/"]
    assert "runs/first/" in completions(COMMANDS, ["plot", "runs/f"])


def test_completion_of_the_shell_in_use_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    main(["completion"])
    assert capsys.readouterr().out.strip() == SCRIPTS["zsh"]


def test_completion_of_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "there is no completion for fish; seedrl completion bash|zsh" in capsys.readouterr().err


class Terminal:
    """A shell in a terminal of its own: what is typed, and what is shown."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._screen, shell = pty.openpty()
        environment = {"PATH": f"{directory}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(directory), "PS1": "$ "}
        self._process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=shell, stdout=shell, stderr=shell, start_new_session=True
        )
        os.close(shell)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def shows(self, pattern: str) -> str:
        """Wait until something that matches is shown, and forget everything up to its end."""
        while not (found := re.search(pattern, self.shown)):
            assert select.select([self._screen], [], [], DEADLINE)[0], f"not shown: {pattern}\n{self.shown}"
            self.shown += os.read(self._screen, 4096).decode(errors="replace").replace("\a", "")
        self.shown = self.shown[found.end() :]
        return found.group()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._screen)


SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.fixture(params=SHELLS)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """A shell that has been told to complete, by the documented command."""
    if shutil.which(request.param) is None:
        missing(request.param, request.param)
    program = tmp_path / "seedrl"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {sys.executable} -m seedrl "$@"\n')
    program.chmod(0o755)
    started = Terminal(SHELLS[request.param], tmp_path)
    try:
        started.type(f'eval "$(seedrl completion {request.param})"; echo is-$((40 + 2))\n')
        started.shows("is-42")
        yield started
    finally:
        started.close()


def test_shell_completes_commands_keys_and_values(terminal: Terminal) -> None:
    terminal.type("seedrl lea\t")
    terminal.shows("seedrl learner ")
    terminal.type("env=po\t")
    terminal.shows("env=pong ")
    terminal.type("algorithm.optim\t")
    terminal.shows("algorithm.optimizer=")
    terminal.type("rm\t")
    terminal.shows("rmsprop ")
    terminal.type("--cfg job | grep -e 'optimizer:' -e '  id:' | tr '\\n' ';'\n")
    terminal.shows("id: Pong-v5;.*optimizer: rmsprop;")
