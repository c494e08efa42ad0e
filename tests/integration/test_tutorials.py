"""Every tutorial is done as it says: its programs are written to files, its commands run one after the other."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.integration.processes import Commands, Process, summary_of
from tests.integration.waiting import free_address

TUTORIALS = ROOT / "docs/tutorials"
LONGEST = 400.0  # seconds for one command; reached only when something hangs, not on a machine with ten times its load
LASTING = ("learner", "actor")  # commands that run beside those after them

pytestmark = pytest.mark.timeout(1500)
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Tutorial:
    """The blocks of a tutorial, done in a directory of the test."""

    def __init__(self, name: str, commands: Commands, **replaced: str) -> None:
        self.text = (TUTORIALS / f"{name}.md").read_text()
        self.commands = commands
        self.replaced = {**replaced, "run_dir=": "display=plain metrics= run_dir="}
        self.lasting: list[Process] = []
        self.printed: dict[str, str] = {}

    def do(self, skip: str = "nothing") -> None:
        """Write every program when it comes, run every command; run programs without classes in the end."""
        programs = []
        for language, block in BLOCK.findall(self.text):
            if language == "python":
                programs.append(self.write(block))
            else:
                self.run(block, skip)
        for program in programs:
            if "\nclass " not in program.read_text():
                self.printed[program.name] = self.python(program)
        for process in self.lasting:
            assert process.wait(LONGEST) == 0, process.err

    def write(self, block: str) -> Path:
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "a program begins with the name of its file"
        path = self.commands.directory / name[1]
        path.write_text(block)
        return path

    def run(self, block: str, skip: str) -> None:
        for line in block.splitlines():
            for before, after in self.replaced.items():
                line = line.replace(before, after)
            program, command, *words = shlex.split(line)
            assert program == "seedrl"
            if skip in line:
                continue
            path = Path(f"{self.commands.directory}:{ROOT}")
            process = self.commands.start(command, *words, path=path)
            if command in LASTING:
                self.lasting.append(process)
                self.lasting[0].says("serving" if command == "learner" else "joined with")
            else:
                assert process.wait(LONGEST) == 0, f"{line}\n{process.out}\n{process.err}"
                self.printed[line] = process.out

    def python(self, program: Path) -> str:
        environment = {"PYTHONPATH": f"{self.commands.directory}:{ROOT}", "PATH": "/usr/bin:/bin"}
        directory = self.commands.directory
        done = subprocess.run(
            [sys.executable, program], cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.long
def test_environment_tutorial_heats_the_room(commands: Commands) -> None:
    tutorial = Tutorial("environment", commands)
    tutorial.do()
    degrees = float(tutorial.printed["use_it.py"].split()[0])
    assert degrees < 4  # never heating is 5 off, always heating 20; 1 is possible
    assert (commands.directory / "thermostat.png").stat().st_size


@pytest.mark.long
def test_model_tutorial_trains_its_models(commands: Commands) -> None:
    Tutorial("model", commands).do()
    assert summary_of(commands.directory / "runs/residual")["return_mean_100"] > 60  # 22 by chance
    assert summary_of(commands.directory / "runs/remembering")["updates"] > 5


@pytest.mark.long
def test_algorithm_tutorial_learns(commands: Commands) -> None:
    Tutorial("algorithm", commands).do()
    assert summary_of(commands.directory / "runs/a2c")["return_mean_100"] > 60  # 22 by chance


@pytest.mark.long
def test_dashboards_tutorial_shows_the_run_and_its_curve(commands: Commands) -> None:
    tutorial = Tutorial("dashboards", commands)
    tutorial.do(skip="seedrl doctor")  # it needs a learner that runs
    assert (commands.directory / "watched.png").stat().st_size
    assert "DONE" in tutorial.printed["seedrl status runs/watched"]


@pytest.mark.long
def test_two_machines_tutorial_trains_with_certificates(commands: Commands) -> None:
    address = free_address()
    replaced = {"10.0.0.1:50051": address, "10.0.0.1": "127.0.0.1", "env=cartpole": "env=cartpole stop.env_steps=20000"}
    Tutorial("two-machines", commands, **replaced).do()
    assert summary_of(commands.directory / "runs/two")["env_steps"] >= 20_000


@pytest.mark.cluster
def test_cluster_tutorial_runs_on_every_engine(commands: Commands) -> None:
    Tutorial("cluster", commands).do()
    for name in ("ranks", "ray", "following"):
        assert summary_of(commands.directory / "runs" / name)["env_steps"] >= 40_000
    assert list((commands.directory / "manifests").glob("*.yaml"))
