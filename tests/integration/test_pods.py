"""A rendered job, run as its pods would: their commands, settings and secrets, at addresses of this machine."""

import re
import shlex
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from seedrl.config import CertsConfig
from seedrl.launching.pod_settings import SECRETS, PodSettings
from tests.integration.processes import Commands, saved_steps
from tests.integration.waiting import eventually, free_address
from tests.manifests import job_of
from tests.test_kubernetes import as_in_a_pod, container_of

certs = pytest.importorskip("seedrl.wire.certificates")


def status_of(address: str, path: str) -> int:
    """Return the status of an answer over HTTP; 0 if there is none."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def secrets_of(job: PodSettings, directory: Path) -> list[str]:
    """Made as the instructions say; returns settings that lead to them instead of to the mounted Secret."""
    certs.run_certs(CertsConfig(out=str(directory), hosts=job.certificate_hosts))
    for role, config in (("learner", job.learner), ("actor", job.actor)):
        for path in vars(config.security).values():
            if isinstance(path, str):
                assert (directory / Path(path).name).exists(), f"{role} has {path}, and `seedrl certs` makes none"
    return [str(SECRETS), str(directory)]


def probe(job: PodSettings, role: str, name: str) -> str:
    return str(container_of(job, role)[name]["httpGet"]["path"])


@pytest.mark.cluster
def test_pods_of_a_job_find_each_other_over_tls_and_probes_tell_how_they_are(
    commands: Commands, tmp_path: Path
) -> None:
    job = job_of("env=catch", "actors.envs=8", "checkpoint.seconds=3600", "stop.env_steps=100000000")
    mounted, made = secrets_of(job, tmp_path / "certs")
    run, settings = tmp_path / "run", tmp_path / "settings"
    settings.mkdir()
    pages = {role: free_address() for role in ("learner", "actor")}
    open_to_all = {role: page.replace("127.0.0.1", "0.0.0.0") for role, page in pages.items()}
    port = free_address().rpartition(":")[2]

    def words_of(role: str, **elsewhere: str) -> list[str]:
        """A pod's arguments; only what is of another machine is said anew."""
        words = as_in_a_pod(job, role, settings)
        text = (settings / f"job-{role}.yaml").read_text().replace(mounted, made)
        (settings / f"job-{role}.yaml").write_text(text)
        assert words[:2] == ["python", "-m"]
        return [*words[2:], *(f"{key}={shlex.quote(value)}" for key, value in elsewhere.items())]

    module, *arguments = words_of("learner", listen=f"0.0.0.0:{port}", metrics=open_to_all["learner"], run_dir=str(run))
    learner = commands.start(*arguments, module=module)
    eventually(lambda: status_of(pages["learner"], probe(job, "learner", "startupProbe")) == 200)
    assert status_of(pages["learner"], probe(job, "learner", "readinessProbe")) == 503  # no actor has been there yet
    # The Service's name is not known here; the certificate is for localhost, too.
    module, *arguments = words_of("actor", learner=f"localhost:{port}", metrics=open_to_all["actor"])
    actor = commands.start(*arguments, module=module)
    for role, page in pages.items():
        eventually(lambda role=role, page=page: status_of(page, probe(job, role, "readinessProbe")) == 200)
        assert status_of(page, probe(job, role, "livenessProbe")) == 200
    with urllib.request.urlopen(f"http://{pages['learner']}/metrics", timeout=5) as answer:
        scraped = answer.read().decode()
    assert re.search(r"^seedrl_sessions_open 1\.0$", scraped, re.MULTILINE)
    learner.signal(signal.SIGTERM)
    assert learner.wait(30) == 0
    assert saved_steps(run) > 0
    actor.signal(signal.SIGTERM)
    assert actor.wait(30) == 0
