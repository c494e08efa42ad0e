"""The wheel works where there is no checkout. Built without isolation, installed without dependencies: no network.

The wheel goes into a folder of its own that comes first on the path; its dependencies come from this environment.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.integration.waiting import eventually, free_address, is_listening

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Installed:
    """A wheel unpacked by pip into `site`, and an empty folder to work in."""

    wheel: Path
    site: Path
    elsewhere: Path

    def python(self, *arguments: str) -> str:
        return run([sys.executable, *arguments], self.elsewhere, PYTHONPATH=str(self.site))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    dist, site, elsewhere = (tmp_path_factory.mktemp(name) for name in ("dist", "site", "elsewhere"))
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(ROOT)], elsewhere)
    [wheel] = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel)], elsewhere)
    return Installed(wheel, site, elsewhere)


def test_wheel_holds_the_packages_and_conf_and_nothing_else(installed: Installed) -> None:
    expected = {f"{package}/{path}" for package in ("seedrl", "envs_server") for path in files_of(package)}
    expected |= {f"seedrl/conf/{path}" for path in files_of("conf")}
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {
        "seedrl/py.typed",
        "envs_server/py.typed",
        "seedrl/v1/inference_pb2.pyi",
        "seedrl/conf/run.yaml",
        "seedrl/conf/env/cartpole.yaml",
    } <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_without_extras_requires_neither_torch_nor_envpool(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = BytesParser().parsebytes(archive.read(metadata))
    requirements = [Requirement(line) for line in fields.get_all("Requires-Dist", [])]
    assert "torch" in {requirement.name for requirement in requirements}
    always = {each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})}
    assert "grpcio" in always
    assert always.isdisjoint({"torch", "envpool", "safetensors"})


def test_installed_wheel_is_imported_instead_of_the_checkout(installed: Installed) -> None:
    program = "import seedrl.v1.inference_pb2, envs_server.pool as p; print(seedrl.__file__, p.__file__, sep='\\n')"
    files = installed.python("-c", program).split()
    assert files == [str(installed.site / "seedrl/__init__.py"), str(installed.site / "envs_server/pool.py")]


def test_installed_wheel_shows_help_with_the_choices_of_its_conf(installed: Installed) -> None:
    assert "| cartpole | catch |" in installed.python("-m", "seedrl", "run", "--help", "all")


def test_installed_wheel_composes_settings_from_its_conf(installed: Installed) -> None:
    assert "id: Pong-v5" in installed.python("-m", "seedrl", "run", "env=pong", "--cfg", "job")
    assert "learner: localhost:1" in installed.python("-m", "envs_server", "learner=localhost:1", "--cfg", "job")


def test_installed_wheel_has_the_seedrl_program(installed: Installed) -> None:
    program = [str(installed.site / "bin/seedrl"), "--version"]
    assert run(program, installed.elsewhere, PYTHONPATH=str(installed.site)).startswith("seedrl ")


@pytest.mark.long
def test_installed_wheel_submits_a_job_and_loads_its_policy_and_resumes_it(installed: Installed) -> None:
    """The two ways of docs/python.md, and the commands that take the run that came of it as the newest."""
    printed = installed.python("-c", PROGRAM)
    assert printed.splitlines() == ["done", "[0, 1]", "interrupted"]
    assert "INTERRUPTED" in installed.python("-m", "seedrl", "status")
    assert "mean" in installed.python("-m", "seedrl", "eval", "episodes=2", "envs=2")


@pytest.fixture(scope="module")
def clean(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment of its own in which pip installs the wheel; only its dependencies come from this one."""
    where = tmp_path_factory.mktemp("clean")
    venv.create(where, with_pip=False)
    [packages] = where.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(where / "bin/python"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    run([*pip, "--disable-pip-version-check", "--ignore-installed", str(installed.wheel)], where)
    return where


@pytest.mark.long
def test_clean_environment_trains_and_shows_its_page(clean: Path, tmp_path: Path) -> None:
    """`seedrl run` with its live page, `seedrl status`, and the last checkpoint: all from the wheel."""
    seedrl, address = str(clean / "bin/seedrl"), free_address()
    settings = ["env=cartpole", "stop.return_mean_100=null", "stop.env_steps=1000000000", f"metrics={address}"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [seedrl, "run", *settings, "run_dir=run", "display=plain"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: process.poll() is not None or is_listening(address))
            page = eventually(lambda: fetched(f"http://{address}/"))
            assert "<title>" in page
            eventually(lambda: has_trained(fetched(f"http://{address}/metrics")))
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert "INTERRUPTED" in run([seedrl, "status", "run"], tmp_path, PYTHONPATH="")
    assert list((tmp_path / "run/checkpoints").iterdir())


def test_clean_environment_has_the_dashboards_and_presets_of_the_checkout(clean: Path, tmp_path: Path) -> None:
    program = "from seedrl.commandline.settings import conf_directory; print(conf_directory())"
    conf = Path(run([str(clean / "bin/python"), "-c", program], tmp_path, PYTHONPATH="").strip())
    assert clean in conf.parents
    for path in files_of("conf"):
        assert (conf / path).read_bytes() == (ROOT / "conf" / path).read_bytes()
    assert {path.suffix for path in (conf / "observability").rglob("*")} >= {".json", ".yml", ".html"}


def has_trained(metrics: str) -> bool:
    found = re.search(r"^seedrl_updates_total ([\d.e+]+)$", metrics, re.MULTILINE)
    return found is not None and float(found[1]) > 0


def fetched(url: str) -> str:
    """Return a page; empty if it is not served yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())
    except OSError:
        return ""


PROGRAM = """
import numpy as np, seedrl
from seedrl.job import Job

small = Job().env("cartpole").actors(total=1, envs=8).set("algorithm.batch_size=8", "stop.return_mean_100=null")
handle = small.set("stop.env_steps=2000").build().submit("by hand")
print(handle.wait()["status"])
policy = seedrl.load(handle.directory, greedy=False)
print(sorted(set(policy.act(np.zeros((100, 4))).tolist())))
handle = small.set("stop.env_steps=1000000000").build().submit("by hand")
while handle.status().env_steps <= 2000 or handle.status().state != "running":
    try:
        handle.wait(0.2)
    except TimeoutError:
        pass
print(handle.stop()["status"])
"""


def files_of(folder: str) -> list[str]:
    """The files of a folder of the checkout, relative to it; what Python wrote left out."""
    files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path.as_posix() for path in files if "__pycache__" not in path.parts]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Return what a program printed; fail with everything it said if it failed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
