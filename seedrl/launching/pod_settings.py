"""The names, addresses and settings of a job in pods, and the refusal of a job that cannot run there.

Knows nothing of manifests.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from seedrl.config import ActorConfig, Engine, LearnerConfig, RunConfig, SecurityConfig
from seedrl.errors import require
from seedrl.launching.placement import ACTOR, LEARNER
from seedrl.monitoring.endpoint import AUTO, AUTO_PORT, address_of
from seedrl.plugins import is_own, modules_of
from seedrl.run.directory import plain, restored
from seedrl.validation import check, check_actor, check_placement
from seedrl.wire.security import is_local, is_socket

LISTEN_PORT = 50051
RUNS = PurePosixPath("/runs")
SECRETS = PurePosixPath("/etc/seedrl/secrets")
SETTINGS = PurePosixPath("/etc/seedrl/settings")
SERVER, CLIENT = "server", "client"  # the names that `seedrl certs` gives the two ends
RESERVED = ("NODE_NAME", "POD_NAME")
NAME_LENGTH = 40  # leaves room for -learner-0 and the like within 63

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class PodSettings:
    """Everything that the manifests of a job are made of."""

    name: str
    run: RunConfig  # as it was asked for
    learner: LearnerConfig
    actor: ActorConfig

    @property
    def namespace(self) -> str:
        return self.run.launch.namespace

    @property
    def ranks(self) -> int:
        return self.run.ranks.count

    @property
    def is_secure(self) -> bool:
        return not self.run.security.allow_insecure

    @property
    def is_elastic(self) -> bool:
        return self.run.actors.at_most > 0

    @property
    def port(self) -> int:
        return address_of(self.learner.listen, "listen")[1]

    @property
    def pages_port(self) -> int:
        return address_of(self.learner.metrics)[1]

    def named(self, role: str) -> str:
        """Return the name of a role's StatefulSet or Deployment, and of its Secret."""
        return f"{self.name}-{role}"

    @property
    def domain(self) -> str:
        """Return the name of the headless Service: it stands for all ranks, and each rank's own name ends with it."""
        return _domain(self.name, self.namespace)

    @property
    def first_rank(self) -> str:
        return _first_rank(self.name, self.namespace)

    @property
    def certificate_hosts(self) -> list[str]:
        """Return the hosts of the learner's certificate; localhost is for `kubectl port-forward`."""
        return [self.domain, f"*.{self.domain}", "localhost"]


def pod_settings(config: RunConfig) -> PodSettings:
    """Return the settings of a job in pods. Raises ConfigError for a job that cannot run there."""
    check_placement(config)
    _check_job(config)
    name = _job_name(config)
    _refuse_files_of_this_machine(config, name)
    learner, actor = _learner(config, name), _actor(config, name)
    each_advertises = replace(learner.ranks, advertise=_domain(name, config.launch.namespace))
    check(replace(learner, ranks=each_advertises))
    check_actor(actor)
    return PodSettings(name, config, learner, actor)


def _check_job(config: RunConfig) -> None:
    launch = config.launch
    require(
        launch.engine is Engine.kubernetes,
        f"launch={launch.engine.name} has no manifests: `seedrl render` needs launch=kubernetes, which is its default",
    )
    require(not config.lockstep, "lockstep=true needs one machine: pods may be moved at any time")
    require(
        not config.ranks.separate,
        "ranks.separate=true is not rendered: the rank that trains serves no pages, so its pod could not be probed",
    )
    require(
        not is_own(config.env.id) or config.actors.count == 0,
        f"env.id={config.env.id} is an environment that actors bring, which rendered actors cannot: set "
        "actors.count=0 and write a Deployment for your own actors",
    )
    require(
        not config.ranks.advertise,
        f"ranks.advertise={config.ranks.advertise} differs from rank to rank; the manifests give each its own",
    )
    require(
        "@" not in launch.image,
        f"launch.image={launch.image} is one image; learner and actor need one each",
    )
    require(launch.storage_gb > 0, f"launch.storage_gb={launch.storage_gb} must be positive")
    require(
        bool(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", launch.namespace)),
        f"launch.namespace={launch.namespace} cannot name a namespace: use lower-case letters, digits and dashes",
    )
    for role, needs in ((LEARNER, launch.learner), (ACTOR, launch.actor)):
        require(
            needs.gpus == int(needs.gpus),
            f"launch.{role}.gpus={needs.gpus}: Kubernetes assigns whole accelerators only",
        )
        taken = sorted({*launch.env, *needs.env} & set(RESERVED))
        require(not taken, f"launch.{role}.env: {', '.join(taken)} is set by the manifests")
    _check_addresses(config)


def _check_addresses(config: RunConfig) -> None:
    """Refuse addresses that other pods could not reach."""
    for setting, address in (("listen", config.listen), ("metrics", config.metrics)):
        if address in ("", AUTO):
            continue
        require(
            not is_socket(address) and not is_local(address),
            f"{setting}={address} can be reached only from inside the pod; leave it out, or give 0.0.0.0:PORT",
        )
        host, port = address_of(address, setting)
        require(
            host in ("0.0.0.0", "::") and port > 0,
            f"{setting}={address}: the address of a pod is not known in advance; leave it out, or give 0.0.0.0:PORT",
        )
    require(bool(config.metrics), "metrics must not be empty: probes and Prometheus need it; leave it out")
    require(not config.socket, f"socket={config.socket} has no use: no actor runs inside the learner's pod")
    ports = _listen(config), _metrics(config)
    require(
        address_of(ports[0])[1] != address_of(ports[1])[1],
        f"listen={ports[0]} and metrics={ports[1]} are the same port",
    )


def _refuse_files_of_this_machine(config: RunConfig, name: str) -> None:
    for setting in ("certificate_file", "key_file", "ca_file", "token_file"):
        path = getattr(config.security, setting)
        require(
            not path,
            f"security.{setting}={path} is a file on this machine; pods get theirs from the Secrets "
            f"{name}-{LEARNER} and {name}-{ACTOR}: leave it out",
        )
    require(
        not config.run_dir,
        f"run_dir={config.run_dir} is a directory on this machine; pods have theirs on a volume: leave it out",
    )


def _job_name(config: RunConfig) -> str:
    """Return the name of the job, which names Services and therefore has to be a DNS label."""
    if given := config.launch.name:
        require(
            bool(_NAME.fullmatch(given)) and len(given) <= NAME_LENGTH,
            f"launch.name={given} cannot name a Service: use up to {NAME_LENGTH} lower-case letters, digits, dashes",
        )
        return given
    words = re.sub(r"[^a-z0-9]+", "-", config.env.id.lower()).strip("-")
    return (words if _NAME.fullmatch(words) else f"job-{words}")[:NAME_LENGTH].strip("-")


def _learner(config: RunConfig, name: str) -> LearnerConfig:
    """Return the learner's settings: the job's, except for what differs in a pod."""
    learner = restored(LearnerConfig, plain(config))
    learner.listen, learner.metrics = _listen(config), _metrics(config)
    learner.run_dir = str(RUNS / name)
    # From the pod's share: a pod sees every core of its node.
    learner.threads = config.threads or max(1, int(config.launch.learner.cpus) // 2)
    learner.serving.shared_memory = False  # pods on one node share no /proc
    learner.security = _security(config, SERVER)
    return learner


def _actor(config: RunConfig, name: str) -> ActorConfig:
    """Return an actor's settings; the learner sends it the rest. With several ranks the first assigns it one."""
    namespace = config.launch.namespace
    host = _domain(name, namespace) if config.ranks.count == 1 else _first_rank(name, namespace)
    return ActorConfig(
        learner=f"{host}:{address_of(_listen(config), 'listen')[1]}",
        threads=config.actors.threads or max(1, math.ceil(config.launch.actor.cpus)),
        modules=modules_of(config.env.id, config.env.wrappers),
        metrics=_metrics(config),
        security=_security(config, CLIENT),
    )


def _security(config: RunConfig, end: str) -> SecurityConfig:
    """Return TLS with certificates at both ends and a token, or neither. A NetworkPolicy protects the pages."""
    if config.security.allow_insecure:
        return SecurityConfig(allow_insecure=True)
    return SecurityConfig(
        certificate_file=str(SECRETS / f"{end}.pem"),
        key_file=str(SECRETS / f"{end}.key"),
        ca_file=str(SECRETS / "ca.pem"),
        token_file=str(SECRETS / "token"),
        allow_open_pages=True,
    )


def secret_files(end: str) -> list[str]:
    """Return the files that the Secret of an end holds, by the names that `seedrl certs` gives them."""
    return [f"{end}.pem", f"{end}.key", "ca.pem", "token"]


def _listen(config: RunConfig) -> str:
    return config.listen or f"0.0.0.0:{LISTEN_PORT}"


def _metrics(config: RunConfig) -> str:
    return f"0.0.0.0:{AUTO_PORT}" if config.metrics == AUTO else config.metrics


def _domain(name: str, namespace: str) -> str:
    return f"{name}-{LEARNER}.{namespace}.svc"


def _first_rank(name: str, namespace: str) -> str:
    return f"{name}-{LEARNER}-0.{_domain(name, namespace)}"
