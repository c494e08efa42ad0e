"""Commands whose output is read only in part, and commands without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seedrl.commandline.extras import explained, refuse_without
from seedrl.commandline.output import CLOSED
from seedrl.commands import COMMANDS
from seedrl.errors import ConfigError
from tests.integration.processes import Commands, summary_of

ROOT = Path(__file__).parents[1]
SMALL = ("actors.envs=8", "algorithm.batch_size=4", "stop.env_steps=1000", "stop.return_mean_100=null", "metrics=")


def read_in_part(lines: int, directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command, read some lines of its output and leave; return its exit code and what it said of errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "seedrl", *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stream:
        err = stream.read()
    return process.wait(), err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help", "all"], ["run", "--cfg", "job"]])
def test_answer_that_is_read_in_part_ends_silently(tmp_path: Path, arguments: list[str]) -> None:
    code, err = read_in_part(0, tmp_path, *arguments)
    assert code == CLOSED
    assert err == ""


@pytest.mark.long
def test_run_whose_output_is_read_in_part_continues_to_its_end(tmp_path: Path) -> None:
    code, err = read_in_part(1, tmp_path, "run", "env=cartpole", "run_dir=run", "display=plain", *SMALL)
    assert code == 0
    assert err == "nothing reads the output any more; seedrl learner continues without it\n"
    assert summary_of(tmp_path / "run")["status"] == "done"


WITHOUT_TORCH = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""
NEEDS_TORCH = {"run", "learner", "eval", "serve", "export", "record"}
REQUIRED = {
    "actor": ["learner=unix:nowhere", "patience=0"],
    "render": ["out=manifests"],
    **{name: ["run=run"] for name in ("eval", "serve", "export", "record", "card")},
    "status": ["learner=unix:nowhere"],
    "control": ["pause", "learner=unix:nowhere"],
    "doctor": ["learner=unix:nowhere"],
    "observe": ["listen=nowhere"],
    "plot": ["nowhere"],
}


def test_missing_module_is_explained_with_what_to_install() -> None:
    error = explained("plot", ModuleNotFoundError("No module named 'matplotlib.pyplot'", name="matplotlib.pyplot"))
    assert str(error) == "seedrl plot needs matplotlib, which is not installed: pip install 'seedrl[plot]'"
    assert explained("run", ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    with pytest.raises(ConfigError, match=r"seedrl run needs optuna, .*'seedrl\[optuna\]'"):
        refuse_without("optuna", "run", find=lambda _: None)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"bench"}))
def test_command_without_torch_has_no_traceback(commands: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "site/sitecustomize.py").parent.mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT_TORCH)
    path = f"{tmp_path / 'site'}:{ROOT}"
    code, out, err = commands.run(name, *REQUIRED.get(name, []), PYTHONPATH=path)
    assert "Traceback" not in out + err
    if name in NEEDS_TORCH:
        assert code == 2
        assert (
            err == f"seedrl {name}: seedrl {name} needs torch, which is not installed: pip install 'seedrl[learner]'\n"
        )
        assert not (tmp_path / "runs").exists()
