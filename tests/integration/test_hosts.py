"""A learner and actors on machines of their own, over TLS with certificates on both sides and a token."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seedrl.config import CertsConfig
from seedrl.run.context import ContextFile
from seedrl.wire.certificates import run_certs
from tests.integration.hosts import ROOT, Hosts
from tests.integration.processes import Process, summary_of
from tests.integration.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
PORT = 50051


class Network:
    """Three hosts, what was started on them, and the files of `seedrl certs`."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self.certs = directory / "certs"
        self.learner = f"{hosts.addresses[0]}:{PORT}"
        self._started: list[Process] = []
        run_certs(CertsConfig(out=str(self.certs), hosts=[hosts.addresses[0]]))

    def start(self, host: int, module: str, *words: str) -> Process:
        command = self.hosts.on(host, [sys.executable, "-m", module, *words])
        self._started.append(Process(command, self.directory, len(self._started), {"PYTHONPATH": str(ROOT)}))
        return self._started[-1]

    def security(self, name: str) -> list[str]:
        """Return the settings that docs/security.md gives for a side."""
        files = {
            "certificate_file": f"{name}.pem",
            "key_file": f"{name}.key",
            "ca_file": "ca.pem",
            "token_file": "token",
        }
        return [f"security.{key}={self.certs / file}" for key, file in files.items()]

    def close(self) -> None:
        for process in reversed(self._started):
            process.end()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Hosts(3) as hosts:
        made = Network(hosts, tmp_path)
        yield made
        made.close()


def test_actors_of_two_other_hosts_train_a_learner_over_tls_and_one_without_it_is_refused(network: Network) -> None:
    run_dir = network.directory / "run"
    settings = ("env=cartpole", "stop.env_steps=60_000", "stop.return_mean_100=null", "actors.envs=8", "display=plain")
    learner = network.start(
        0,
        "seedrl",
        "learner",
        *settings,
        f"listen={network.learner}",
        f"run_dir={run_dir}",
        *network.security("server"),
    )
    learner.says("serving CartPole-v1")
    stranger = network.start(
        2, "envs_server", f"learner={network.learner}", "security.allow_insecure=true", "patience=5", "name=stranger"
    )
    actors = [
        network.start(
            host, "envs_server", f"learner={network.learner}", f"name=host-{host}", *network.security("client")
        )
        for host in (1, 2)
    ]
    eventually(lambda: {"host-1", "host-2"} <= set(ContextFile(run_dir).read_or_new().members))
    assert stranger.wait() != 0
    assert [learner.wait(), *(actor.wait() for actor in actors)] == [0, 0, 0], learner.err
    assert summary_of(run_dir)["env_steps"] >= 60_000
    members = ContextFile(run_dir).read_or_new().members
    assert "stranger" not in members
