"""`seedrl render`: writes a job as manifests for kubectl. Knows nothing of what is in them."""

import shlex
from pathlib import Path

from seedrl.config import RenderConfig
from seedrl.errors import ConfigError, require
from seedrl.launching.kubernetes import MARK, files
from seedrl.launching.placement import ACTOR, LEARNER
from seedrl.launching.pod_settings import CLIENT, SERVER, PodSettings, pod_settings, secret_files


def run_render(config: RenderConfig) -> None:
    directory = Path(config.out)
    job = pod_settings(config)
    write(directory, files(job))
    print("\n".join(_instructions(job, directory)))


def write(directory: Path, texts: dict[str, str]) -> None:
    """Write all files, or none if one would replace a file that `seedrl render` did not write."""
    foreign = [name for name in texts if not _is_ours(directory / name)]
    require(
        not foreign,
        f"out={directory} holds {', '.join(foreign)}, which `seedrl render` did not write; give another out=",
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"out={directory} cannot be written to: {error.strerror}") from error


def _is_ours(path: Path) -> bool:
    """Return whether `seedrl render` wrote the file, or there is none."""
    try:
        return path.read_text(errors="replace").startswith(MARK)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise ConfigError(f"out={path.parent} cannot be written to: {error.strerror}") from error


def _instructions(job: PodSettings, directory: Path) -> list[str]:
    actors = job.run.actors
    count = f"{actors.count} to {actors.at_most}" if job.is_elastic else actors.count
    where = shlex.quote(str(directory))
    return [
        f"{directory} holds job {job.name}: {job.ranks} × learner, {count} × actor, in namespace {job.namespace}",
        "",
        "Once:",
        *(f"  {line}" for line in [*_secrets(job), f"kubectl apply -f {where}/claim.yaml"]),
        "Then, and after every change:",
        f"  kubectl apply -k {where}",
    ]


def _secrets(job: PodSettings) -> list[str]:
    """Return the commands that make the Secrets that the manifests refer to."""
    if not job.is_secure:
        return []
    hosts = shlex.quote(f"hosts=[{','.join(job.certificate_hosts)}]")
    commands = [f"seedrl certs out=certs {hosts}"]
    for role, end in ((LEARNER, SERVER), (ACTOR, CLIENT)):
        sources = " ".join(f"--from-file=certs/{name}" for name in secret_files(end))
        commands.append(f"kubectl create secret generic {job.named(role)} --namespace={job.namespace} {sources}")
    return commands
