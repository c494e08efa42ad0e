"""Jobs that are rendered in tests. `python -m tests.manifests` renews tests/golden/kubernetes."""

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from seedrl.commandline.main import compose
from seedrl.config import RenderConfig
from seedrl.launching.kubernetes import files
from seedrl.launching.pod_settings import PodSettings, pod_settings

GOLDEN = Path(__file__).parent / "golden/kubernetes"

VARIANTS = {
    "one_rank": "env=pong launch.name=pong actors.count=4",
    "two_ranks": "env=pong launch.name=pong launch.namespace=rl ranks.count=2 actors.count=8 launch.learner.gpus=1 "
    "launch.storage_class=shared",
    "elastic": "env=cartpole actors.count=2 actors.at_most=8 launch.image=registry.example:5000/seedrl:1.0",
    "insecure": "env=catch security.allow_insecure=true metrics=0.0.0.0:9000 listen='[::]:7000'",
    "placed": "env=pong ranks.count=2 actors.count=8 launch.placement=[collocate,spread] launch.per_node=4 "
    "launch.actor.cpus=1.5 launch.actor.memory_gb=0.5 +launch.actor.selector.pool=cpu "
    "+launch.learner.selector.pool=gpu +launch.env.TZ=UTC +launch.actor.env.TZ=CET report.wandb=games",
}


@functools.cache
def rendered(variant: str) -> PodSettings:
    """Return the job of a variant, composed once per process; tests must not change it."""
    return job_of(*VARIANTS[variant].split())


def job_of(*overrides: str) -> PodSettings:
    config = compose("render", ["out=anywhere", *overrides])
    assert isinstance(config, RenderConfig)
    return pod_settings(config)


def documents(texts: dict[str, str]) -> list[dict[str, Any]]:
    return [document for text in texts.values() for document in yaml.load_all(text, yaml.CSafeLoader)]


def objects(job: PodSettings) -> dict[tuple[str, str], Any]:
    """(kind, name) → manifest; the kustomization is none of the cluster's."""
    found = [each for each in documents(files(job)) if each["kind"] != "Kustomization"]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def stable(job: PodSettings) -> dict[str, str]:
    """The files without what changes with every new setting: a test of its own has the settings."""
    texts = {name: text for name, text in files(job).items() if name != "settings.yaml"}
    return {name: re.sub(r"(?<=checksum/settings: ).+", "…", text) for name, text in texts.items()}


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for variant in VARIANTS:
        for name, text in stable(rendered(variant)).items():
            (GOLDEN / variant).mkdir(parents=True, exist_ok=True)
            (GOLDEN / variant / name).write_text(text)
