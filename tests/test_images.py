"""The Dockerfiles. Nothing here builds an image: there is no Docker engine where this is tested."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from seedrl.launching.pods import USER
from tests.test_contracts import ROOT, declared

ROLES = ("learner", "actor")
roles = pytest.mark.parametrize("role", ROLES)


def file_of(role: str) -> Path:
    return ROOT / f"docker/{role}.Dockerfile"


def instructions(role: str, name: str) -> list[str]:
    parser = DockerfileParser(str(file_of(role)))
    return [each["value"] for each in parser.structure if each["instruction"] == name]


def copied(role: str) -> list[str]:
    """Return the files that are copied from the checkout."""
    words = [value.split() for value in instructions(role, "COPY") if not value.startswith("--from")]
    return [source for *sources, _ in words for source in sources]


def extras(role: str) -> list[str]:
    """Return the extras that pip installs by default."""
    [default] = re.findall(r"^EXTRAS=(\S+)$", "\n".join(instructions(role, "ARG")), re.MULTILINE)
    [install] = [value for value in instructions(role, "RUN") if "pip install" in value]
    assert '".[${EXTRAS}]"' in install
    assert "-c constraints.txt" in install
    return str(default).split(",")


def test_there_is_an_image_for_each_role() -> None:
    assert {path.name for path in (ROOT / "docker").iterdir()} == {file_of(role).name for role in ROLES}


@roles
def test_dockerfile_passes_hadolint(role: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, file_of(role)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@roles
def test_image_is_made_of_files_that_exist_and_that_docker_is_shown(role: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for source in copied(role):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source


@roles
def test_image_installs_extras_that_exist(role: str) -> None:
    assert declared(*extras(role))  # KeyError otherwise


def test_image_of_the_actor_has_no_torch_and_that_of_the_learner_no_environments() -> None:
    assert "torch" not in {requirement.name for requirement in declared(*extras("actor"))}
    assert "envpool" not in {requirement.name for requirement in declared(*extras("learner"))}


@roles
def test_image_runs_as_the_user_of_the_manifests(role: str) -> None:
    assert instructions(role, "USER") == [f"{USER}:{USER}"]
    [user] = [value for value in instructions(role, "RUN") if "useradd" in value]
    assert f"--uid {USER} --gid {USER}" in user


def test_images_are_made_of_enough_to_build_the_package(tmp_path: Path) -> None:
    """What pip does in the image, offline, with nothing but the files that are copied there."""
    assert copied("learner") == copied("actor")
    for source in copied("learner"):
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, tmp_path / source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"seedrl/commands.py", "envs_server/main.py", "seedrl/conf/learner.yaml"} <= names
