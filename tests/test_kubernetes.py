"""Manifests of a job: Kubernetes' schemas accept them, they fit together, and pods get the job that was asked for."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import kubernetes_validate
import promql_parser
import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from seedrl.commandline.main import compose, main
from seedrl.config import ActorConfig, CertsConfig, LearnerConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.kubernetes import MARK, files
from seedrl.launching.liveness import is_live
from seedrl.launching.pod_settings import PodSettings
from seedrl.launching.pods import image
from seedrl.monitoring.endpoint import Endpoint, Page
from seedrl.run.directory import plain
from seedrl.wire.certificates import make
from seedrl.wire.security import exposures
from tests.integration.support import grpc_server
from tests.integration.waiting import DEADLINE, free_address
from tests.manifests import GOLDEN, VARIANTS, documents, job_of, objects, rendered, stable
from tests.programs import needed
from tests.test_contracts import ROOT, run

OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
DOCS = Path(__file__).parents[1] / "docs/kubernetes"
OVERLAY = DOCS / "overlay"

variants = pytest.mark.parametrize("variant", VARIANTS)


# What Kubernetes says.


@variants
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_what_kubernetes_expects(variant: str, version: str) -> None:
    for manifest in objects(rendered(variant)).values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_validation_sees_a_misspelt_field() -> None:
    manifest = objects(rendered("one_rank"))["StatefulSet", "pong-learner"]
    manifest["spec"]["podManagmentPolicy"] = manifest["spec"].pop("podManagementPolicy")
    with pytest.raises(kubernetes_validate.ValidationError, match="podManagmentPolicy"):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


@variants
def test_kinds_are_those_of_a_service_that_lives_long(variant: str) -> None:
    job = rendered(variant)
    kinds = [kind for kind, _ in objects(job)]
    expected = ["ConfigMap", "Deployment", "NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim"]
    expected += ["PodDisruptionBudget", "PodDisruptionBudget", "Service", "StatefulSet"]
    expected += ["HorizontalPodAutoscaler"] if variant == "elastic" else []
    assert sorted(kinds) == sorted(expected)


# Golden files.


@variants
def test_files_are_the_golden_ones(variant: str) -> None:
    golden = {path.name: path.read_text() for path in (GOLDEN / variant).iterdir()}
    assert stable(rendered(variant)) == golden, "run `make manifests` if this is what you want, and read the difference"


def test_golden_files_are_of_these_jobs_only() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(VARIANTS)


# Pods get the job that was asked for.


def pod_of(job: PodSettings, role: str) -> dict[str, Any]:
    kind = "StatefulSet" if role == "learner" else "Deployment"
    template: dict[str, Any] = objects(job)[kind, f"{job.name}-{role}"]["spec"]["template"]
    return template


def container_of(job: PodSettings, role: str) -> dict[str, Any]:
    [container] = pod_of(job, role)["spec"]["containers"]
    return dict(container)


def as_in_a_pod(job: PodSettings, role: str, directory: Path, number: int = 0) -> list[str]:
    """Command and arguments of a role's pod, as the kubelet would start it with its files in this directory."""
    config_map = objects(job)["ConfigMap", f"{job.name}-settings"]
    [volume] = [each for each in pod_of(job, role)["spec"]["volumes"] if each["name"] == "settings"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    for item in volume["configMap"]["items"]:
        (directory / item["path"]).write_text(config_map["data"][item["key"]])
    container = container_of(job, role)
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "settings"]
    words = [*container["command"], *container["args"]]
    assert container["env"][0]["name"] == "POD_NAME"
    words = [word.replace("$(POD_NAME)", f"{job.name}-{role}-{number}") for word in words]
    return [word.replace(mount["mountPath"], str(directory)) for word in words]


def composed(command: str, words: list[str]) -> Any:
    """The settings that these words of a command line give, composed by Hydra as in the command itself."""
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    compose(command, ["learner=any"] if command == "actor" else [])  # so that schemas are known
    with initialize_config_dir(options["config-dir"], version_base="1.3"):
        return OmegaConf.to_object(hydra_compose(options["config-name"], overrides))


@variants
def test_learners_in_pods_have_the_settings_of_the_job(variant: str, tmp_path: Path) -> None:
    job = rendered(variant)
    words = as_in_a_pod(job, "learner", tmp_path, job.ranks - 1)
    learner = composed("learner", words[words.index("learner") + 1 :])
    assert type(learner) is LearnerConfig
    expected = plain(job.learner)
    if job.ranks > 1:
        rank = f"{job.name}-learner-{job.ranks - 1}.{job.name}-learner.{job.namespace}.svc"
        assert learner.ranks.advertise == rank
        expected["ranks"]["advertise"] = learner.ranks.advertise
    assert plain(learner) == expected


@variants
def test_learners_in_pods_differ_from_seedrl_run_only_in_what_pods_need(variant: str) -> None:
    job = rendered(variant)
    asked, given = plain(compose("run", ["launch=kubernetes", *VARIANTS[variant].split()])), plain(job.learner)
    assert {key for key in given if asked[key] != given[key]} <= {
        *("listen", "metrics", "run_dir", "threads", "serving", "security")
    }
    assert {**asked["serving"], "shared_memory": False} == given["serving"]


@variants
def test_actors_in_pods_have_settings_that_lead_to_the_learner(variant: str, tmp_path: Path) -> None:
    job = rendered(variant)
    actor = composed("actor", as_in_a_pod(job, "actor", tmp_path)[3:])
    assert type(actor) is ActorConfig
    assert plain(actor) == {**plain(job.actor), "name": f"{job.name}-actor-0"}
    host, _, port = actor.learner.rpartition(":")
    service = objects(job)["Service", f"{job.name}-learner"]
    assert int(port) == service["spec"]["ports"][0]["port"] == int(job.learner.listen.rpartition(":")[2])
    named = f"{service['metadata']['name']}.{job.namespace}.svc"
    assert host == (named if job.ranks == 1 else f"{job.name}-learner-0.{named}")


@pytest.mark.long
def test_torchrun_takes_the_command_and_the_learner_its_settings(tmp_path: Path) -> None:
    """Everything but the network: the real program, one rank, at an address of this machine."""
    words = as_in_a_pod(rendered("two_ranks"), "learner", tmp_path, 1)
    names = {word.partition("=")[0]: word for word in words}
    here = {"--nnodes": "1", "--rdzv-endpoint": "localhost:0", "--local-addr": "localhost", "--max-restarts": "0"}
    assert set(here) <= set(names)
    command = [f"{name}={here[name]}" if (name := word.partition("=")[0]) in here else word for word in words]
    done = subprocess.run(
        [sys.executable, *command[1:], "--cfg", "job"], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    settings = yaml.safe_load(done.stdout)
    assert settings["ranks"]["advertise"] == "pong-learner-1.pong-learner.rl.svc"
    assert settings["run_dir"] == "/runs/pong"


@pytest.mark.long
def test_torchrun_gives_rank_0_to_the_first_name_whoever_comes_first(tmp_path: Path) -> None:
    """Two real rendezvous on this machine, the later name first; pods have names in the same order."""
    words = as_in_a_pod(rendered("two_ranks"), "learner", tmp_path)
    options = words[: words.index("-m", words.index("torch.distributed.run"))]
    endpoint = free_address()
    ask = [sys.executable, "-c", "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"]

    def start(address: str) -> subprocess.Popen[str]:
        here = {"--rdzv-endpoint": endpoint, "--local-addr": address}
        changed = [f"{name}={here[name]}" if (name := word.partition("=")[0]) in here else word for word in options]
        command = [sys.executable, *changed[1:], "--no-python", *ask]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    started = {address: start(address) for address in ("127.0.0.2", "127.0.0.1")}
    try:
        said = {address: process.communicate(timeout=DEADLINE)[0].strip() for address, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    assert said == {"127.0.0.1": "rank 0 of 2", "127.0.0.2": "rank 1 of 2"}


# Manifests fit together.


@variants
def test_selectors_select_the_pods_they_are_meant_for(variant: str) -> None:
    job = rendered(variant)
    found = objects(job)
    for role, kind in (("learner", "StatefulSet"), ("actor", "Deployment")):
        name = f"{job.name}-{role}"
        pod = pod_of(job, role)["metadata"]["labels"]
        assert pod["app.kubernetes.io/component"] == role
        assert found[kind, name]["spec"]["selector"]["matchLabels"] == pod
        assert found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == pod
        assert found["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] == pod
    service = found["Service", f"{job.name}-learner"]["spec"]
    assert service["selector"] == pod_of(job, "learner")["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert found["StatefulSet", f"{job.name}-learner"]["spec"]["serviceName"] == f"{job.name}-learner"


@variants
def test_volumes_are_mounted_and_exist(variant: str) -> None:
    job = rendered(variant)
    for role in ("learner", "actor"):
        volumes = {volume["name"]: volume for volume in pod_of(job, role)["spec"]["volumes"]}
        assert {mount["name"] for mount in container_of(job, role)["volumeMounts"]} == set(volumes)
        assert ("secrets" in volumes) is (variant != "insecure")
        if "run" in volumes:
            assert ("PersistentVolumeClaim", volumes["run"]["persistentVolumeClaim"]["claimName"]) in objects(job)


@variants
def test_files_of_the_settings_are_mounted(variant: str) -> None:
    job = rendered(variant)
    for role, config in (("learner", job.learner), ("actor", job.actor)):
        mounts = [Path(mount["mountPath"]) for mount in container_of(job, role)["volumeMounts"]]
        security = config.security
        paths = [security.certificate_file, security.key_file, security.ca_file, security.token_file]
        assert all(paths) is (variant != "insecure")
        for path in filter(None, [*paths, job.learner.run_dir if role == "learner" else ""]):
            assert any(mount in Path(path).parents for mount in mounts), path


@variants
def test_probes_ask_for_live_and_ready_where_the_pages_are(variant: str) -> None:
    job = rendered(variant)
    for role, config in (("learner", job.learner), ("actor", job.actor)):
        container = container_of(job, role)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.metrics == f"0.0.0.0:{ports['metrics']}"
        if role == "actor" or job.ranks == 1:
            assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
        annotations = pod_of(job, role)["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(ports["metrics"])
    assert container_of(job, "learner")["startupProbe"]["httpGet"]["path"] == "/healthz"


def test_liveness_of_several_ranks_tolerates_that_torchrun_restarts_one() -> None:
    """While torchrun restarts a rank nothing listens at its metrics port; an HTTP probe would end the container."""
    probe = container_of(rendered("two_ranks"), "learner")["livenessProbe"]
    *command, port = probe["exec"]["command"]
    assert port == "9464"
    with socket.socket() as bound:  # and listening to nobody, so that the port stays closed
        bound.bind(("localhost", 0))
        closed = bound.getsockname()[1]
        command = [sys.executable, *command[1:]]
        done = subprocess.run([*command, str(closed)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == 0


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False)])
def test_liveness_is_what_a_rank_that_listens_answers(status: int, expected: bool) -> None:
    endpoint = Endpoint("127.0.0.1:0", {"/healthz": lambda: Page(b"", status=status)}, on_error=lambda words: None)
    address = endpoint.start()
    try:
        assert is_live(int(address.rpartition(":")[2])) is expected
    finally:
        endpoint.stop()


def test_liveness_fails_for_a_rank_that_accepts_and_never_answers() -> None:
    with socket.create_server(("localhost", 0)) as silent:
        assert not is_live(silent.getsockname()[1], answer_seconds=0.05)


def test_ranks_meet_in_a_new_store_after_each_restart() -> None:
    """torchrun would keep its store over restarts, and ranks would find the addresses of the dead there."""
    variables = {each["name"]: each.get("value") for each in container_of(rendered("two_ranks"), "learner")["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    for variant, role in (("one_rank", "learner"), ("two_ranks", "actor")):
        names = {each["name"] for each in container_of(rendered(variant), role)["env"]}
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in names


@variants
def test_pods_have_no_rights_they_do_not_need(variant: str) -> None:
    """Pod Security Standards, profile `restricted`, and a root file system nobody writes to."""
    job = rendered(variant)
    for role in ("learner", "actor"):
        spec, container = pod_of(job, role)["spec"], container_of(job, role)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert spec["terminationGracePeriodSeconds"] == 30


def ingress(job: PodSettings, role: str) -> list[tuple[str, list[int]]]:
    """(who, ports) that a role's policy lets in."""
    policy = objects(job)["NetworkPolicy", f"{job.name}-{role}"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    rules = []
    for rule in policy["ingress"]:
        [peer] = rule["from"]
        chosen = peer["podSelector"]["matchLabels"]
        who = chosen.get("app.kubernetes.io/component", chosen["app.kubernetes.io/name"])
        rules.append((who, [port["port"] for port in rule.get("ports", [])]))
    return rules


def test_network_lets_in_actors_and_prometheus_and_ranks_if_there_are_several() -> None:
    assert ingress(rendered("one_rank"), "learner") == [("actor", [50051]), ("prometheus", [9464])]
    assert ingress(rendered("two_ranks"), "learner") == [("actor", [50051]), ("prometheus", [9464]), ("learner", [])]
    assert ingress(rendered("insecure"), "learner") == [("actor", [7000]), ("prometheus", [9000])]
    assert ingress(rendered("one_rank"), "actor") == [("prometheus", [9464])]


def test_network_lets_a_learner_out_to_wandb_only_if_it_reports_there() -> None:
    def ports(variant: str) -> list[int]:
        job = rendered(variant)
        rules = objects(job)["NetworkPolicy", f"{job.name}-learner"]["spec"]["egress"]
        return [port["port"] for rule in rules for port in rule.get("ports", [])]

    assert ports("one_rank") == [53, 53]
    assert ports("placed") == [53, 53, 443]


@variants
def test_only_pages_are_open_unless_the_job_is_insecure(variant: str) -> None:
    job = rendered(variant)
    words = exposures(job.learner)
    if variant == "insecure":
        assert len(words) == 2
    else:
        assert words == ["metrics=0.0.0.0:9464 reaches beyond this machine, and pages have neither TLS nor tokens"]
        assert not job.learner.security.allow_insecure
        assert not job.actor.security.allow_insecure


@pytest.mark.parametrize(
    ("host", "is_covered"),
    [
        ("pong-learner.rl.svc", True),
        ("pong-learner-1.pong-learner.rl.svc", True),
        ("localhost", True),
        ("other-learner.rl.svc", False),
        ("a.b.pong-learner.rl.svc", False),
    ],
)
def test_certificate_of_the_instructions_is_for_every_name_of_the_learner(host: str, is_covered: bool) -> None:
    """The names are checked by gRPC, which has rules of its own for names with a star."""
    made = make(CertsConfig(hosts=rendered("two_ranks").certificate_hosts))
    pair = (made["server.key"], made["server.pem"])
    own = grpc.ssl_channel_credentials(made["ca.pem"], made["client.key"], made["client.pem"])
    with grpc_server(threads=1) as server:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], made["ca.pem"], True))
        server.start()
        name = [("grpc.ssl_target_name_override", host)]
        with grpc.secure_channel(f"127.0.0.1:{port}", own, options=name) as channel:
            states: Queue[grpc.ChannelConnectivity] = Queue()
            channel.subscribe(states.put, try_to_connect=True)
            ends = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
            state = next(state for state in iter(lambda: states.get(timeout=DEADLINE), None) if state in ends)
            channel.unsubscribe(states.put)
    assert state is (ends[0] if is_covered else ends[1])


@variants
def test_secrets_are_named_and_never_written(variant: str) -> None:
    job = rendered(variant)
    assert not [kind for kind, _ in objects(job) if kind == "Secret"]
    text = "".join(files(job).values())
    assert "SEEDRL_TOKEN" not in text
    assert "PRIVATE KEY" not in text


# Settings of `launch`.


def test_resources_selectors_and_variables_are_the_roles() -> None:
    job = rendered("placed")
    actor, learner = container_of(job, "actor"), container_of(job, "learner")
    assert actor["resources"] == {"requests": {"cpu": "1500m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
    assert learner["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    assert container_of(rendered("two_ranks"), "learner")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod_of(job, "actor")["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert pod_of(job, "learner")["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert {"name": "TZ", "value": "CET"} in actor["env"]
    assert {"name": "TZ", "value": "UTC"} in learner["env"]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in learner["env"] if "valueFrom" in each
    }
    assert fields == {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}


def test_threads_are_the_cores_of_the_pod_and_not_of_this_machine() -> None:
    job = job_of("launch.learner.cpus=8", "launch.actor.cpus=2.5")
    assert (job.learner.threads, job.actor.threads) == (4, 3)
    job = job_of("threads=3", "actors.threads=7")
    assert (job.learner.threads, job.actor.threads) == (3, 7)


def test_placement_is_what_kubernetes_has_for_it() -> None:
    spec = pod_of(rendered("placed"), "actor")["spec"]
    [beside] = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert beside["topologyKey"] == "kubernetes.io/hostname"
    assert beside["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "learner"
    even, limit = spec["topologySpreadConstraints"]
    assert (even["maxSkew"], even["whenUnsatisfiable"]) == (1, "ScheduleAnyway")
    assert (limit["maxSkew"], limit["whenUnsatisfiable"]) == (4, "DoNotSchedule")
    assert limit["minDomains"] > 10_000  # more than any cluster has nodes: so the emptiest counts as empty
    plainly = pod_of(rendered("one_rank"), "actor")["spec"]
    assert {"affinity", "topologySpreadConstraints", "nodeSelector"}.isdisjoint(plainly)


def test_actors_follow_the_metric_between_their_bounds_only_if_they_may_grow() -> None:
    job = rendered("elastic")
    scaler = objects(job)["HorizontalPodAutoscaler", "cartpole-v1-actor"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert scaler["scaleTargetRef"]["name"] == "cartpole-v1-actor"
    [metric] = scaler["metrics"]
    assert metric["external"]["metric"]["name"] == "seedrl_desired_actors"
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert "replicas" not in objects(job)["Deployment", "cartpole-v1-actor"]["spec"]
    assert objects(rendered("one_rank"))["Deployment", "pong-actor"]["spec"]["replicas"] == 4


def test_ranks_are_replicas_that_start_together_and_share_the_run_directory() -> None:
    found = objects(rendered("two_ranks"))
    learner = found["StatefulSet", "pong-learner"]["spec"]
    assert learner["replicas"] == 2
    assert learner["podManagementPolicy"] == "Parallel"
    assert learner["updateStrategy"] == {"type": "OnDelete"}
    claim = found["PersistentVolumeClaim", "pong-run"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["storageClassName"] == "shared"
    assert objects(rendered("one_rank"))["PersistentVolumeClaim", "pong-run"]["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]


def test_a_change_of_settings_changes_the_pods_of_the_role_it_concerns() -> None:
    def digests(*overrides: str) -> list[str]:
        job = job_of("env=pong", *overrides)
        return [pod_of(job, role)["metadata"]["annotations"]["checksum/settings"] for role in ("learner", "actor")]

    learner, actor = digests()
    assert digests("seed=2")[0] != learner
    assert digests("seed=2")[1] == actor
    assert digests("actors.threads=9")[1] != actor


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seedrl", "seedrl-actor"),
        ("seedrl:1.0", "seedrl-actor:1.0"),
        ("host:5000/team/seedrl", "host:5000/team/seedrl-actor"),
        ("host:5000/team/seedrl:1.0", "host:5000/team/seedrl-actor:1.0"),
    ],
)
def test_image_has_its_ending_before_its_tag(name: str, expected: str) -> None:
    assert image(name, "actor") == expected


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("env=pong", "pong-v5"),
        ("env.id=gymnasium:ALE/Pong-v5", "gymnasium-ale-pong-v5"),
        ("env.id=2048-v1", "job-2048-v1"),
        ("env=pong launch.name=mine", "mine"),
        (f"env.id={'A' * 70}", "a" * 40),
    ],
)
def test_name_is_the_environments_as_a_service_can_have_it(overrides: str, name: str) -> None:
    assert job_of(*overrides.split()).name == name


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("listen=127.0.0.1:50051", "listen=127.0.0.1:50051 can be reached only from inside the pod"),
        ("listen=unix:/tmp/x.sock", "listen=unix:/tmp/x.sock can be reached only from inside the pod"),
        ("listen=10.0.0.1:50051", "listen=10.0.0.1:50051: the address of a pod is not known in advance"),
        ("listen=0.0.0.0:0", "listen=0.0.0.0:0: the address of a pod is not known in advance"),
        ("metrics=127.0.0.1:9464", "metrics=127.0.0.1:9464 can be reached only from inside the pod"),
        ("metrics=''", "metrics must not be empty: probes and Prometheus need it"),
        ("metrics=0.0.0.0:50051", "are the same port"),
        ("socket=unix:/tmp/x.sock", "socket=unix:/tmp/x.sock has no use: no actor runs inside"),
        ("lockstep=true", "lockstep=true needs one machine"),
        ("launch=ray", "launch=ray has no manifests"),
        ("launch.name=Pong", "launch.name=Pong cannot name a Service"),
        ("launch.namespace=a_b", "launch.namespace=a_b cannot name a namespace"),
        ("launch.learner.gpus=0.5", "launch.learner.gpus=0.5: Kubernetes assigns whole accelerators only"),
        ("+launch.env.POD_NAME=x", "POD_NAME is set by the manifests"),
        ("launch.image=seedrl@sha256:0", "launch.image=seedrl@sha256:0 is one image"),
        ("launch.storage_gb=0", "launch.storage_gb=0.0 must be positive"),
        ("launch.per_node=-1", "launch.per_node=-1 must not be negative"),
        ("security.certificate_file=server.pem", "security.certificate_file=server.pem is a file on this machine"),
        ("security.token_file=token", "security.token_file=token is a file on this machine"),
        ("run_dir=runs/a", "run_dir=runs/a is a directory on this machine"),
        ("ranks.advertise=a:1", "ranks.advertise=a:1 differs from rank to rank"),
        ("env=own", "env.id=own is an environment that actors bring"),
    ],
)
def test_settings_that_cannot_work_in_pods_are_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of(override)


def test_ranks_that_serve_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks.separate=true is not rendered"):
        job_of("ranks.count=2", "ranks.separate=true")


# The command.


def command(*arguments: str) -> None:
    main(["render", *arguments])


def test_render_writes_the_files_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep/manifests"
    command(f"out={out}", *VARIANTS["one_rank"].split())
    assert {path.name: path.read_text() for path in out.iterdir()} == files(rendered("one_rank"))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"{out} holds job pong: 1 × learner, 4 × actor, in namespace default"
    assert f"kubectl apply -k {out}" in lines
    assert f"kubectl apply -f {out}/claim.yaml" in lines
    made = [line for line in lines if line.startswith("kubectl create secret generic")]
    assert [shlex.split(line)[4] for line in made] == ["pong-learner", "pong-actor"]


def test_render_of_the_same_job_overwrites_and_changes_nothing(tmp_path: Path) -> None:
    command(f"out={tmp_path}", "env=pong")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    command(f"out={tmp_path}", "env=pong")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert all(text.startswith(MARK.encode()) for text in before.values())


def test_render_refuses_to_overwrite_what_it_did_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    with pytest.raises(SystemExit) as ended:
        command(f"out={tmp_path}")
    assert ended.value.code == 2
    assert f"out={tmp_path} holds kustomization.yaml, which `seedrl render` did not write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kustomization.yaml"]


def test_render_into_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        command(f"out={tmp_path}/file")
    assert "cannot be written to" in capsys.readouterr().err


def test_render_of_an_insecure_job_asks_for_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(f"out={tmp_path}", "security.allow_insecure=true")
    assert "secret" not in capsys.readouterr().out


def test_run_refuses_kubernetes_with_the_command_that_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", "launch=kubernetes", "env=pong", "launch.name=a", "actors.count=3"])
    assert ended.value.code == 2
    words = capsys.readouterr().err.strip().rpartition(": seedrl ")[2]
    main(shlex.split(words))
    written = {path.name: path.read_text() for path in (tmp_path / "manifests").iterdir()}
    assert written == files(job_of("env=pong", "launch.name=a", "actors.count=3"))


def test_render_composes_the_same_job_as_run() -> None:
    overrides = VARIANTS["placed"].split()
    render, run = (
        plain(compose("render", ["out=x", *overrides])),
        plain(compose("run", ["launch=kubernetes", *overrides])),
    )
    assert {key: render[key] for key in plain(RunConfig())} == {key: run[key] for key in plain(RunConfig())}


# What docs/kubernetes.md tells Prometheus and its adapter.


def test_adapter_asks_for_the_metric_that_the_autoscaler_follows() -> None:
    [rule] = yaml.safe_load((DOCS / "adapter.yaml").read_text())["externalRules"]
    [metric] = objects(rendered("elastic"))["HorizontalPodAutoscaler", "cartpole-v1-actor"]["spec"]["metrics"]
    name, labels = metric["external"]["metric"]["name"], metric["external"]["metric"]["selector"]["matchLabels"]
    matchers = ",".join(f'{key}="{value}"' for key, value in {"namespace": "default", **labels}.items())
    query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.LabelMatchers>>", matchers)
    promql_parser.parse(query)
    promql_parser.parse(rule["seriesQuery"])
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert query.startswith("sum(")  # every rank says how many it could use


def test_prometheus_finds_the_pods_and_gives_the_labels_that_the_autoscaler_selects_by() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load((DOCS / "prometheus.yaml").read_text())["scrape_configs"]}
    selected = {"namespace", "app_kubernetes_io_instance"}
    for job, role in (("seedrl", "learner"), ("seedrl-actors", "actor")):
        keep, *gives = jobs[job]["relabel_configs"]
        pod = pod_of(rendered("elastic"), role)["metadata"]["labels"]
        ports = [port["name"] for port in container_of(rendered("elastic"), role)["ports"]]
        name, component, port = keep["regex"].split(";")
        assert (pod["app.kubernetes.io/name"], pod["app.kubernetes.io/component"]) == (name, component)
        assert port in ports
        assert selected <= {rule["target_label"] for rule in gives}


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """All of it but the discovery of pods, which Debian's Prometheus is built without."""
    text = (DOCS / "prometheus.yaml").read_text()
    assert text.count("kubernetes_sd_configs: [{role: pod}]") == 2
    known = text.replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: [{targets: [localhost:9464]}]")
    (tmp_path / "prometheus.yaml").write_text(known)
    run(needed("promtool"), "check", "config", str(tmp_path / "prometheus.yaml"))


# Kustomize.


def test_kustomization_names_every_file_but_the_claim() -> None:
    texts = files(rendered("one_rank"))
    kustomization = yaml.safe_load(texts["kustomization.yaml"])
    assert {*kustomization["resources"], "kustomization.yaml", "claim.yaml"} == set(texts)


def test_overlay_patches_what_is_there() -> None:
    found = objects(rendered("one_rank"))
    kustomization = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    patches = [yaml.safe_load((OVERLAY / patch["path"]).read_text()) for patch in kustomization["patches"]]
    assert patches
    for patch in patches:
        assert (patch["kind"], patch["metadata"]["name"]) in found
    assert {patch.name for patch in OVERLAY.iterdir()} == {
        "kustomization.yaml",
        *(patch["path"] for patch in kustomization["patches"]),
    }
    assert {each["name"] for each in kustomization["images"]} <= {"seedrl-learner", "seedrl-actor"}


def test_overlay_gives_manifests_with_its_changes(tmp_path: Path) -> None:
    """kubectl itself applies the overlay, for which it needs no cluster."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl: the patches' targets are tested without it")
    shutil.copytree(OVERLAY, tmp_path / "overlay")
    command(f"out={tmp_path}/manifests", *VARIANTS["one_rank"].split())
    done = subprocess.run(
        [kubectl, "kustomize", str(tmp_path / "overlay")], capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    built = {(each["kind"], each["metadata"]["name"]): each for each in documents({"": done.stdout})}
    for manifest in built.values():
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
    base = objects(rendered("one_rank"))
    assert set(built) == {key for key in base if key[0] != "PersistentVolumeClaim"}
    actor = built["Deployment", "pong-actor"]["spec"]
    assert actor["replicas"] == 16
    assert actor["template"]["spec"]["nodeSelector"] == {"pool": "spot"}
    [container] = actor["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example/")
    assert container["args"] == container_of(rendered("one_rank"), "actor")["args"]
    assert built["ConfigMap", "pong-settings"]["data"] == base["ConfigMap", "pong-settings"]["data"]
