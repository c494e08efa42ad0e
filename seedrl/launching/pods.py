"""The pods of a job as plain dicts: their containers, rights and nodes. Knows no file and no YAML."""

import math
from typing import Any

from seedrl.config import Placement, RoleConfig
from seedrl.launching.placement import ACTOR, LEARNER
from seedrl.launching.pod_settings import RUNS, SECRETS, SETTINGS, PodSettings
from seedrl.launching.torchrun import FRESH_STORE

Body = dict[str, Any]

RENDEZVOUS_PORT = 29400
USER = 1000  # the images' user
GRACE_SECONDS = 30  # from SIGTERM to SIGKILL; a learner takes up to 25 s for its checkpoint
START_SECONDS = 900  # for the other ranks to start and a checkpoint to be read
READABLE_BY_GROUP = 0o440  # files of a Secret are root's, and the pod's user is in their group
HOSTNAME = "kubernetes.io/hostname"
MORE_NODES_THAN_THERE_ARE = 1_000_000


def labels(job: PodSettings, role: str = "") -> dict[str, str]:
    """Return the labels that select the pods of a job, or of one of its roles."""
    chosen = {"app.kubernetes.io/name": "seedrl", "app.kubernetes.io/instance": job.name}
    return {**chosen, "app.kubernetes.io/component": role} if role else chosen


def learner_pod(job: PodSettings, digest: str) -> Body:
    needs = job.run.launch.learner
    several = job.ranks > 1
    own_name = [f"ranks.advertise=$(POD_NAME).{job.domain}"] if several else []
    container = {
        "name": LEARNER,
        "image": image(job.run.launch.image, LEARNER),
        "command": _torchrun(job) if several else ["python", "-m", "seedrl"],
        "args": ["learner", *_settings_of(LEARNER), *own_name],
        "ports": [_port("grpc", job.port), _port("metrics", job.pages_port)],
        "startupProbe": _probe("/healthz", period=5, failures=START_SECONDS // 5),
        "livenessProbe": _liveness_beside_torchrun(job) if several else _probe("/healthz", period=10, failures=3),
        "readinessProbe": _probe("/readyz", period=5, failures=1),
        **_surroundings(job, needs, FRESH_STORE if several else {}),
    }
    container["volumeMounts"].append({"name": "run", "mountPath": str(RUNS)})
    pod = _pod(job, LEARNER, needs, container, digest)
    pod["spec"]["volumes"].append({"name": "run", "persistentVolumeClaim": {"claimName": f"{job.name}-run"}})
    if Placement.spread in job.run.launch.placement:
        pod["spec"]["topologySpreadConstraints"] = [_evenly(job, LEARNER)]
    return pod


def actor_pod(job: PodSettings, digest: str) -> Body:
    needs = job.run.launch.actor
    container = {
        "name": ACTOR,
        "image": image(job.run.launch.image, ACTOR),
        "command": ["python", "-m", "envs_server"],
        "args": [*_settings_of(ACTOR), "name=$(POD_NAME)"],
        "ports": [_port("metrics", job.pages_port)],
        "livenessProbe": _probe("/healthz", period=10, failures=6),
        "readinessProbe": _probe("/readyz", period=5, failures=1),
        **_surroundings(job, needs, {}),
    }
    pod = _pod(job, ACTOR, needs, container, digest)
    pod["spec"].update(_placement(job))
    return pod


def _torchrun(job: PodSettings) -> list[str]:
    """Return the command that starts a rank. torchrun numbers ranks by address, so pod 0 is always rank 0."""
    return [
        *("python", "-m", "torch.distributed.run"),
        f"--nnodes={job.ranks}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.name}",
        f"--rdzv-endpoint={job.first_rank}:{RENDEZVOUS_PORT}",
        f"--local-addr=$(POD_NAME).{job.domain}",
        f"--max-restarts={job.run.max_restarts}",
        *("-m", "seedrl"),
    ]


def settings_name(role: str) -> str:
    """Return the name of a role's settings file, without ending; it differs from the image's own learner.yaml."""
    return f"job-{role}"


def _settings_of(role: str) -> list[str]:
    return [f"--config-dir={SETTINGS}", f"--config-name={settings_name(role)}"]


def _surroundings(job: PodSettings, needs: RoleConfig, variables: dict[str, str]) -> Body:
    """Return the part of a container that both roles have; users' variables win over these."""
    mounts = [
        {"name": "settings", "mountPath": str(SETTINGS), "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if job.is_secure:
        mounts.append({"name": "secrets", "mountPath": str(SECRETS), "readOnly": True})
    return {
        "imagePullPolicy": "IfNotPresent",
        "workingDir": "/tmp",
        "env": _variables(job, needs, variables),
        "resources": _resources(needs),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _pod(job: PodSettings, role: str, needs: RoleConfig, container: Body, digest: str) -> Body:
    spec: Body = {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes(job, role),
    }
    if needs.selector:
        spec["nodeSelector"] = dict(needs.selector)
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(job.pages_port),
        "prometheus.io/path": "/metrics",
        "checksum/settings": digest,
    }
    return {"metadata": {"labels": labels(job, role), "annotations": annotations}, "spec": spec}


def _volumes(job: PodSettings, role: str) -> list[Body]:
    """Return the volumes of a pod. Only /tmp and the run directory can be written to."""
    file = f"{settings_name(role)}.yaml"
    settings = {"name": f"{job.name}-settings", "items": [{"key": file, "path": file}]}
    volumes: list[Body] = [{"name": "settings", "configMap": settings}, {"name": "tmp", "emptyDir": {}}]
    if job.is_secure:
        secret = {"secretName": job.named(role), "defaultMode": READABLE_BY_GROUP}
        volumes.append({"name": "secrets", "secret": secret})
    return volumes


def _variables(job: PodSettings, needs: RoleConfig, ours: dict[str, str]) -> list[Body]:
    """Kubernetes gives the names of the pod and its node; POD_NAME is first, because arguments refer to it."""
    fields = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
    chosen = {"HOME": "/tmp", **ours, **job.run.launch.env, **needs.env}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in chosen.items()),
    ]


def _resources(needs: RoleConfig) -> Body:
    """Return requests and limits. Cores have no limit: throttling would delay actions."""
    requests = {"cpu": _cores(needs.cpus)}
    limits: dict[str, str] = {}
    if needs.memory_gb:
        requests["memory"] = limits["memory"] = gibibytes(needs.memory_gb)
    if needs.gpus:
        limits["nvidia.com/gpu"] = str(int(needs.gpus))
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _cores(cpus: float) -> str:
    return str(int(cpus)) if cpus == int(cpus) else f"{math.ceil(cpus * 1000)}m"


def gibibytes(amount: float) -> str:
    return f"{int(amount)}Gi" if amount == int(amount) else f"{math.ceil(amount * 1024)}Mi"


def _port(name: str, number: int) -> Body:
    return {"name": name, "containerPort": number}


def _probe(path: str, period: int, failures: int) -> Body:
    return _every(period, failures, {"httpGet": {"path": path, "port": "metrics"}})


def _liveness_beside_torchrun(job: PodSettings) -> Body:
    """Return a probe that tolerates the closed port of a rank that torchrun restarts."""
    command = ["python", "-m", "seedrl.launching.liveness", str(job.pages_port)]
    return _every(10, 3, {"exec": {"command": command}})


def _every(seconds: int, failures: int, question: Body) -> Body:
    return {**question, "periodSeconds": seconds, "timeoutSeconds": 5, "failureThreshold": failures}


def _placement(job: PodSettings) -> Body:
    """Return where actors may go. Kubernetes applies this when it schedules a pod and never moves it later."""
    launch = job.run.launch
    placement: Body = {}
    constraints = []
    if Placement.collocate in launch.placement:
        beside = {"labelSelector": {"matchLabels": labels(job, LEARNER)}, "topologyKey": HOSTNAME}
        placement["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}}
    if Placement.spread in launch.placement:
        constraints.append(_evenly(job, ACTOR))
    if launch.per_node:
        constraints.append(_at_most(job, ACTOR, launch.per_node))
    return {**placement, "topologySpreadConstraints": constraints} if constraints else placement


def _evenly(job: PodSettings, role: str) -> Body:
    return _spread(job, role, {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"})


def _at_most(job: PodSettings, role: str, count: int) -> Body:
    """Limit pods per node: with fewer nodes than minDomains, maxSkew counts from zero instead of the emptiest node."""
    limit = {"maxSkew": count, "minDomains": MORE_NODES_THAN_THERE_ARE, "whenUnsatisfiable": "DoNotSchedule"}
    return _spread(job, role, limit)


def _spread(job: PodSettings, role: str, rule: Body) -> Body:
    return {**rule, "topologyKey": HOSTNAME, "labelSelector": {"matchLabels": labels(job, role)}}


def image(name: str, role: str) -> str:
    """Insert the role before the tag: registry:5000/seedrl:1.0 → registry:5000/seedrl-learner:1.0"""
    folder, slash, last = name.rpartition("/")
    base, colon, tag = last.partition(":")
    return f"{folder}{slash}{base}-{role}{colon}{tag}"
