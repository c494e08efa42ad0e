"""The manifests of a job: settings in, YAML out. Reads and writes no file and contacts no cluster."""

import hashlib
from typing import Any, NamedTuple

import yaml

from seedrl.config import ActorConfig, LearnerConfig
from seedrl.launching.placement import ACTOR, LEARNER
from seedrl.launching.pod_settings import PodSettings
from seedrl.launching.pods import Body, actor_pod, gibibytes, labels, learner_pod, settings_name
from seedrl.run.directory import plain

MARK = "# Written by `seedrl render`, which overwrites it; put your changes into an overlay."
DESIRED_ACTORS = "seedrl_desired_actors"
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}  # the labels of pods that may read metrics
HTTPS_PORT, DNS_PORT = 443, 53
# The head of a role's settings file: Hydra composes these settings and nothing else.
HYDRA = {"run": {"dir": "."}, "output_subdir": None, "job": {"chdir": False}}


class Manifest(NamedTuple):
    comment: str
    body: Body


def files(job: PodSettings) -> dict[str, str]:
    """Return the files by name. The claim is not in the kustomization, so that `kubectl delete -k` keeps the run."""
    contents = {
        "settings.yaml": [_settings(job)],
        "learner.yaml": [_service(job), _stateful_set(job), _budget(job, LEARNER, 1)],
        "actor.yaml": [_deployment(job), _budget(job, ACTOR, "25%"), *([_autoscaler(job)] if job.is_elastic else [])],
        "network.yaml": [_learner_policy(job), _actor_policy(job)],
    }
    named = {name: _text(manifests) for name, manifests in contents.items()}
    return {"claim.yaml": _text([_claim(job)]), **named, "kustomization.yaml": _text([_kustomization(list(named))])}


def _text(manifests: list[Manifest]) -> str:
    documents = []
    for manifest in manifests:
        comment = "".join(f"# {line}\n" for line in manifest.comment.splitlines())
        documents.append(comment + dumped(manifest.body))
    return f"{MARK}\n" + "---\n".join(documents)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a readable block, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dumped(values: Any) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=200)


def settings_file(role: str, config: LearnerConfig | ActorConfig) -> str:
    """Return the complete settings of a role, for `--config-dir` and `--config-name`."""
    defaults = [f"{role}_schema", "_self_", {"override hydra/job_logging": "none"}]
    return dumped({"defaults": defaults, "hydra": HYDRA, **plain(config)})


def _object(job: PodSettings, version: str, kind: str, name: str, role: str, **rest: Any) -> Body:
    metadata = {"name": name, "namespace": job.namespace, "labels": labels(job, role)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _settings_texts(job: PodSettings) -> dict[str, str]:
    return {LEARNER: settings_file(LEARNER, job.learner), ACTOR: settings_file(ACTOR, job.actor)}


def _digest(job: PodSettings, role: str) -> str:
    return hashlib.sha256(_settings_texts(job)[role].encode()).hexdigest()[:16]


def _settings(job: PodSettings) -> Manifest:
    data = {f"{settings_name(role)}.yaml": text for role, text in _settings_texts(job).items()}
    return Manifest(
        "The complete settings of both roles. Defaults of the image do not matter.",
        _object(job, "v1", "ConfigMap", f"{job.name}-settings", "", data=data),
    )


def _claim(job: PodSettings) -> Manifest:
    launch = job.run.launch
    spec: Body = {
        "accessModes": ["ReadWriteOnce" if job.ranks == 1 else "ReadWriteMany"],
        "resources": {"requests": {"storage": gibibytes(launch.storage_gb)}},
    }
    if launch.storage_class:
        spec["storageClassName"] = launch.storage_class
    shared = "" if job.ranks == 1 else "\nEvery rank mounts it, so the storage class has to allow that."
    return Manifest(
        f"The run directory. Apply it once; `kubectl delete -k` keeps it, so that the run can be resumed.{shared}",
        _object(job, "v1", "PersistentVolumeClaim", f"{job.name}-run", LEARNER, spec=spec),
    )


def _service(job: PodSettings) -> Manifest:
    ports = [{"name": "grpc", "port": job.port, "targetPort": "grpc"}]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(job, LEARNER),
        "ports": ports,
    }
    return Manifest(
        "Gives every rank a name. Names exist before readiness: ranks have to meet before any of them is ready, and\n"
        "a new learner is ready only after its first actor has sent the spaces.",
        _object(job, "v1", "Service", job.named(LEARNER), LEARNER, spec=spec),
    )


def _stateful_set(job: PodSettings) -> Manifest:
    several = job.ranks > 1
    spec = {
        "replicas": job.ranks,
        "serviceName": job.named(LEARNER),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete" if several else "RollingUpdate"},
        "selector": {"matchLabels": labels(job, LEARNER)},
        "template": learner_pod(job, _digest(job, LEARNER)),
    }
    comment = (
        "Probes ask the metrics port for what gRPC health calls `live` and `ready`: the kubelet's own gRPC probe has\n"
        "neither TLS nor a token. That port is plain HTTP, and network.yaml limits who may reach it."
    )
    if several:
        comment += (
            "\nRanks train one model, so they change together: after an update delete all of their pods at once\n"
            "(OnDelete). torchrun gathers them at pod 0, gives out ranks, and restarts all when one fails. Meanwhile\n"
            "nothing listens at the metrics port, which the liveness probe must not take for a failure."
        )
    return Manifest(comment, _object(job, "apps/v1", "StatefulSet", job.named(LEARNER), LEARNER, spec=spec))


def _deployment(job: PodSettings) -> Manifest:
    spec = {
        **({} if job.is_elastic else {"replicas": job.run.actors.count}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
        "selector": {"matchLabels": labels(job, ACTOR)},
        "template": actor_pod(job, _digest(job, ACTOR)),
    }
    comment = "While pods are replaced there are never more than the count: the learner might have no slots for them."
    if job.is_elastic:
        comment += "\nThe autoscaler below sets the number, so none is given here."
    return Manifest(comment, _object(job, "apps/v1", "Deployment", job.named(ACTOR), ACTOR, spec=spec))


def _budget(job: PodSettings, role: str, unavailable: int | str) -> Manifest:
    spec = {
        "maxUnavailable": unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels(job, role)},
    }
    return Manifest(
        "Nodes can be drained, but not all of them at once. Pods that are not ready may always be moved."
        if role == ACTOR
        else "A node can be drained: the learner saves, moves and resumes. Of several ranks one at a time.",
        _object(job, "policy/v1", "PodDisruptionBudget", job.named(role), role, spec=spec),
    )


def _autoscaler(job: PodSettings) -> Manifest:
    actors = job.run.actors
    selector = {"matchLabels": {"app_kubernetes_io_instance": job.name}}
    external = {
        "metric": {"name": DESIRED_ACTORS, "selector": selector},
        "target": {"type": "AverageValue", "averageValue": "1"},
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.named(ACTOR)},
        "minReplicas": max(1, actors.count),
        "maxReplicas": actors.at_most,
        "metrics": [{"type": "External", "external": external}],
    }
    return Manifest(
        f"As many actors as {DESIRED_ACTORS} asks for: the target is an average of 1 per actor.\n"
        "Needs an adapter that offers it as an external metric; Kubernetes ignores differences below a tenth.",
        _object(job, "autoscaling/v2", "HorizontalPodAutoscaler", job.named(ACTOR), ACTOR, spec=spec),
    )


def _learner_policy(job: PodSettings) -> Manifest:
    ranks = [{"podSelector": {"matchLabels": labels(job, LEARNER)}}]
    actors = [{"podSelector": {"matchLabels": labels(job, ACTOR)}}]
    among_ranks_in, among_ranks_out = ([{"from": ranks}], [{"to": ranks}]) if job.ranks > 1 else ([], [])
    reports = [{"ports": [_tcp(HTTPS_PORT)]}] if job.learner.report.wandb else []
    spec = {
        "podSelector": {"matchLabels": labels(job, LEARNER)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": actors, "ports": [_tcp(job.port)]}, _scraping(job), *among_ranks_in],
        "egress": [_DNS, *among_ranks_out, *reports],
    }
    comment = (
        "Into a learner: its own actors at the gRPC port, Prometheus at the metrics port, which has neither TLS nor\n"
        "token, and other ranks at any port. The kubelet's probes come from the node and are always allowed.\n"
        "Out of it: names, other ranks, and https if it reports to Weights & Biases."
    )
    return Manifest(comment, _policy(job, LEARNER, spec))


def _actor_policy(job: PodSettings) -> Manifest:
    ranks = [{"podSelector": {"matchLabels": labels(job, LEARNER)}}]
    spec = {
        "podSelector": {"matchLabels": labels(job, ACTOR)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [_scraping(job)],
        "egress": [_DNS, {"to": ranks, "ports": [_tcp(job.port)]}],
    }
    return Manifest("Into an actor: Prometheus. Out of it: names and the learner.", _policy(job, ACTOR, spec))


def _policy(job: PodSettings, role: str, spec: Body) -> Body:
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", job.named(role), role, spec=spec)


def _scraping(job: PodSettings) -> Body:
    pods = {"namespaceSelector": {}, "podSelector": {"matchLabels": PROMETHEUS}}
    return {"from": [pods], "ports": [_tcp(job.pages_port)]}


def _tcp(port: int) -> Body:
    return {"protocol": "TCP", "port": port}


_DNS: Body = {"ports": [{"protocol": "UDP", "port": DNS_PORT}, _tcp(DNS_PORT)]}


def _kustomization(resources: list[str]) -> Manifest:
    return Manifest(
        "For `kubectl apply -k` of this directory; docs/kubernetes/overlay shows how to change its objects.",
        {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources},
    )
