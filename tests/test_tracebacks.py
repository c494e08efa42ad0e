"""Errors of the user's own code: the place in it, the message, the traceback, and how the code is found."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from seedrl import plugins
from seedrl.commandline.exits import errors_as_exit_codes
from seedrl.errors import ConfigError, SeedrlError, ThreadDied
from seedrl.monitoring.doctor import _guarded
from seedrl.tracebacks import failed, place_of, report

MODULE = """
import torch

class Model:
    def __init__(self, size=1):
        self.size = size
        if size < 0:
            raise OverflowError("no such size")

    def forward(self):
        return torch.zeros(2) @ torch.zeros(3)
"""


def write(directory: Path, name: str, text: str = MODULE) -> str:
    (directory / f"{name}.py").write_text(text)
    return name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that Python does not search, as with the installed script `seedrl`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    return tmp_path


def error_of(function: Any, *arguments: Any, **options: Any) -> SeedrlError:
    with pytest.raises(SeedrlError) as raised:
        function(*arguments, **options)
    return raised.value


# The place.


def test_place_is_the_users_innermost_line_and_not_the_librarys(here: Path) -> None:
    model = plugins.build("model.name", f"{write(here, 'place_model')}:Model")
    with pytest.raises(RuntimeError) as raised:
        model.forward()
    assert place_of(raised.value) == "place_model.py:11 in forward"
    failure = failed(ThreadDied, "thread server died", raised.value)
    assert str(failure).startswith("place_model.py:11 in forward: thread server died: RuntimeError(")
    assert "\n" not in str(failure)
    assert "return torch.zeros(2) @ torch.zeros(3)" in failure.traceback
    assert report(failure) == f"{failure}\n{failure.traceback}"


def test_place_of_an_error_in_a_library_alone_is_empty() -> None:
    with pytest.raises(TypeError) as raised:
        plugins.modules_of(None, [])  # type: ignore[arg-type]
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test
    assert place_of(error) == ""
    assert str(failed(ThreadDied, "thread server died", error)).startswith("thread server died: TypeError(")


def test_place_of_a_follow_up_error_is_its_own() -> None:
    def fails() -> None:
        try:
            torch.zeros(2) @ torch.zeros(3)
        except RuntimeError as error:
            raise KeyError("later") from error

    with pytest.raises(KeyError) as raised:
        fails()
    assert place_of(raised.value).endswith(" in fails")


def test_errors_of_seedrl_stay_as_they_are() -> None:
    error = ConfigError("no such setting")
    assert failed(ThreadDied, "thread server died", error) is error
    assert report(error) == "no such setting"


def test_command_that_fails_in_another_way_shows_the_whole_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Hydra would show the last lines of it, and not the user's."""
    with pytest.raises(SystemExit) as ended, errors_as_exit_codes("eval"):
        raise ArithmeticError("no such luck")
    assert ended.value.code == 1
    words, traceback, *_, last = capsys.readouterr().err.splitlines()
    assert words.startswith("seedrl eval: tests/test_tracebacks.py:")
    assert words.endswith("ArithmeticError('no such luck')")
    assert (traceback, last) == ("Traceback (most recent call last):", "ArithmeticError: no such luck")


def test_doctor_shows_the_traceback_of_the_users_code() -> None:
    def fails() -> Any:
        raise ArithmeticError("no such luck")

    [finding] = _guarded("environment", lambda: fails())
    assert finding.words.startswith("environment: tests/test_tracebacks.py:")
    assert finding.words.endswith("ArithmeticError: no such luck")
    assert not finding.is_good


# Finding the user's code.


def test_module_in_the_working_directory_is_found_by_the_installed_script_too(here: Path) -> None:
    assert plugins.build("model.name", f"{write(here, 'found_here')}:Model", size=3).size == 3


def test_constructor_that_raises_is_named_with_line_and_traceback(here: Path) -> None:
    error = error_of(plugins.build, "model.name", f"{write(here, 'raises_here')}:Model", size=-1)
    assert str(error) == (
        "raises_here.py:8 in __init__: model.name=raises_here:Model could not be built: OverflowError('no such size')"
    )
    assert error.traceback.endswith("OverflowError: no such size")


def test_wrong_option_is_named_without_a_traceback(here: Path) -> None:
    error = error_of(plugins.build, "model.name", f"{write(here, 'options_here')}:Model", sice=2)
    assert "unexpected keyword argument 'sice'" in str(error)
    assert error.traceback == ""


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("import os\nimport no_such_package\n", "{name}.py:2 in <module>", "No module named 'no_such_package'"),
        ("def f(:\n    pass\n", "{name}.py:1", "SyntaxError("),
        ("raise SystemExit('not a module')\n", "{name}.py:1 in <module>", "SystemExit('not a module')"),
    ],
    ids=["import", "syntax", "exit"],
)
def test_module_that_cannot_be_imported_is_named_with_line_and_traceback(
    here: Path, text: str, place: str, words: str, request: pytest.FixtureRequest
) -> None:
    name = write(here, f"broken_{request.node.callspec.id}", text)
    error = error_of(plugins.load, "env.id", f"{name}:make")
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{place.format(name=name)}: env.id={name}:make could not be imported: ")
    assert words in str(error)
    assert error.traceback


def test_module_and_name_that_are_not_there_are_named(here: Path) -> None:
    error = error_of(plugins.load, "model.name", "no_such_module:Model")
    assert (
        str(error)
        == f"model.name=no_such_module:Model: there is no module no_such_module, neither installed nor in {here}"
    )
    error = error_of(plugins.load, "model.name", f"{write(here, 'names_here')}:Modle")
    assert str(error) == "model.name=names_here:Modle: names_here has no Modle; did you mean names_here:Model?"
