"""`seedrl run launch=ray` on a real Ray cluster of three nodes, which are processes of this machine with addresses of
their own: who is placed where, and what happens when a process or a node is lost."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray._private import state  # the public one asks a dashboard
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from seedrl.commandline.main import compose
from seedrl.launching.placement import place
from seedrl.launching.ray_cluster import alive, as_node, reserved
from seedrl.launching.ray_reservation import plan_reservation
from tests.integration.processes import Commands, Process, saved_steps, summary_of
from tests.integration.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
INSECURE = ("security.allow_insecure=true",)
CPUS = 4  # of each node, as Ray counts
SMALL = ("actors.envs=8", "algorithm.batch_size=4", "algorithm.unroll_length=10", "threads=1", "actors.threads=1")
ENDLESS = (*SMALL, *INSECURE, "stop.return_mean_100=null", "stop.env_steps=1_000_000_000", "checkpoint.seconds=0.2")
# A node that does not answer is lost after two seconds instead of fifteen.
SYSTEM = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Host(NamedTuple):
    """A Ray actor of ours, as Ray sees it."""

    name: str
    node: str
    pid: int
    restarts: int

    @property
    def child(self) -> int:
        """The process it runs; 0 while there is none."""
        found = Path(f"/proc/{self.pid}/task")
        children = [pid for task in found.glob("*/children") for pid in _read(task).split()]
        ours = [pid for pid in children if b"-m\0" in _bytes(Path(f"/proc/{pid}/cmdline"))]
        return int(ours[0]) if ours else 0

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of the process it runs."""
        lines = _bytes(Path(f"/proc/{self.child}/environ")).decode().split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)


class Job:
    """A run on the cluster."""

    def __init__(self, cluster: Cluster, commands: Commands, *settings: str) -> None:
        self.directory = commands.directory / "run"
        self.before = set(state.actors())
        where = (f"launch.address={cluster.address}", f"run_dir={self.directory}")
        self.process: Process = commands.start("run", "launch=ray", *where, *settings)

    @property
    def hosts(self) -> dict[str, Host]:
        """Return the hosts that are alive, by name."""
        ours = [each for key, each in state.actors().items() if key not in self.before and each["State"] == "ALIVE"]
        return {
            each["Name"]: Host(each["Name"], each["Address"]["NodeID"], each["Pid"], int(each["NumRestarts"]))
            for each in ours
            if each["Name"]
        }

    def runs(self, *names: str) -> dict[str, Host]:
        """Waits until all of these run their processes."""

        def all_there() -> dict[str, Host]:
            assert self.process.is_running, self.process.err
            hosts = self.hosts
            return hosts if all(name in hosts and hosts[name].child for name in names) else {}

        found: dict[str, Host] = eventually(all_there)
        return found

    def trains_on(self) -> None:
        """Waits for two more checkpoints."""
        for _ in range(2):
            before = saved_steps(self.directory)
            eventually(lambda before=before: saved_steps(self.directory) > before or not self.process.is_running)
            assert self.process.is_running, self.process.err


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    for number in range(3):
        add_node(started, number)
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(scope="module")
def spare(cluster: Cluster) -> None:
    """A fourth node, for the tests that lose one; it is there from the first of them on, and ends with the cluster."""
    add_node(cluster, 3)


def add_node(cluster: Cluster, number: int) -> Any:
    """Each has an address of its own; the first, the machine's."""
    settings: dict[str, Any] = {"num_cpus": CPUS, "labels": {"disk": "fast" if number else "slow"}}
    if number == 0:
        settings |= {"include_dashboard": False, "_system_config": SYSTEM}
    else:
        settings |= {"node_ip_address": f"127.0.0.{number + 1}"}
    return cluster.add_node(object_store_memory=80 * 2**20, **settings)


def _read(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_job_is_packed_and_has_the_variables_of_its_roles(cluster: Cluster, commands: Commands) -> None:
    variables = ("+launch.env.A=job", "+launch.env.B=job", "+launch.learner.env.A=learner", "+launch.actor.env.A=actor")
    job = Job(cluster, commands, *ENDLESS, "actors.count=2", "launch.placement=[collocate]", *variables)
    hosts = job.runs("learner", "actor-0", "actor-1")
    assert len({host.node for host in hosts.values()}) == 1
    assert {key: hosts["learner"].variables[key] for key in ("A", "B")} == {"A": "learner", "B": "job"}
    assert {key: hosts["actor-1"].variables[key] for key in ("A", "B")} == {"A": "actor", "B": "job"}
    assert hosts["actor-1"].variables["HOME"] == os.environ["HOME"]
    given = {key: hosts["learner"].variables[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert given == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    job.trains_on()
    children = [host.child for host in hosts.values()]
    job.process.signal(signal.SIGTERM)
    assert job.process.wait() == 0, job.process.err
    assert summary_of(job.directory)["status"] == "interrupted"
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def with_tls(commands: Commands) -> list[str]:
    """Settings for a learner on any node, and for its actors."""
    hosts = ",".join(sorted(node["NodeManagerAddress"] for node in ray.nodes()))
    assert commands.run("certs", f"hosts=[{hosts}]")[0] == 0
    made = commands.directory / "certs"
    learner = (f"certificate_file={made}/server.pem", f"key_file={made}/server.key", f"token_file={made}/token")
    actor = f"launch.security.ca_file={made}/ca.pem"
    return [*(f"security.{setting}" for setting in learner), "security.allow_insecure=false", actor]


def test_spread_job_goes_on_when_an_actor_and_then_its_host_are_killed(cluster: Cluster, commands: Commands) -> None:
    """Its learner is reached over TLS."""
    job = Job(cluster, commands, *ENDLESS, "actors.count=2", "launch.placement=[spread]", *with_tls(commands))
    hosts = job.runs("learner", "actor-0", "actor-1")
    assert len({host.node for host in hosts.values()}) == 3
    job.trains_on()
    for restarts, victim in ((1, hosts["actor-0"].child), (2, 0)):
        pid = job.hosts["actor-0"].pid
        child = job.hosts["actor-0"].child
        began = time.monotonic()
        os.kill(victim or pid, signal.SIGKILL)
        eventually(lambda pid=pid: job.hosts.get("actor-0", hosts["actor-0"]).pid != pid)
        back = job.runs("actor-0")["actor-0"]
        print(f"actor back after {time.monotonic() - began:.1f} s")
        assert back.restarts == restarts
        eventually(lambda child=child: not Path(f"/proc/{child}").exists())
        job.trains_on()
    assert job.hosts["learner"].pid == hosts["learner"].pid
    assert job.process.err.count("actor-0 is back") == 2
    job.process.signal(signal.SIGINT)
    assert job.process.wait() == 0, job.process.err


def test_learner_that_is_killed_goes_on_as_often_as_it_may(cluster: Cluster, commands: Commands) -> None:
    job = Job(cluster, commands, *ENDLESS, "max_restarts=1")
    before = job.runs("learner", "actor-0")
    job.trains_on()
    began = time.monotonic()
    os.kill(before["learner"].child, signal.SIGKILL)
    eventually(lambda: job.hosts.get("learner", before["learner"]).restarts == 1)
    after = job.runs("learner", "actor-0")
    job.trains_on()
    print(f"trains again after {time.monotonic() - began:.1f} s")
    assert "learner: resumed at" in job.process.out
    assert after["actor-0"] == before["actor-0"]
    os.kill(after["learner"].child, signal.SIGKILL)
    assert job.process.wait() == 128 + signal.SIGKILL
    assert "learner has been restarted as often as max_restarts allows" in job.process.err


@pytest.mark.parametrize(
    ("placement", "per_node", "actors", "expected"),
    [("", 0, 5, [4, 2]), ("spread", 0, 5, [2, 2, 2]), ("collocate", 0, 3, [4]), ("", 1, 3, [2, 1, 1])],
)
def test_placement_is_carried_out(
    cluster: Cluster, placement: str, per_node: int, actors: int, expected: list[int]
) -> None:
    config = compose(
        "run", [f"actors.count={actors}", f"launch.placement=[{placement}]", f"launch.per_node={per_node}"]
    )
    eventually(lambda: ray.available_resources().get("CPU") == 3 * CPUS)  # of the tests before
    decided = plan_reservation(config, place(config, [as_node(node) for node in alive()]))
    with reserved(decided, "test", lambda: False) as group:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        placed = Counter(nodes[index] for index, bundle in enumerate(decided.bundles) for _ in bundle.places)
    assert sorted(placed.values(), reverse=True) == expected


def test_job_that_does_not_fit_is_refused_before_anything_starts(cluster: Cluster, commands: Commands) -> None:
    job = Job(cluster, commands, *SMALL, *INSECURE, f"actors.count={3 * CPUS}")
    assert job.process.wait() == 2
    assert f"actor {3 * CPUS - 1} fits on no machine: it needs 1 cores" in job.process.err
    assert not job.directory.exists()
    assert set(state.actors()) == job.before


def lose(cluster: Cluster, node: str) -> None:
    """Remove a node at once, as a power failure would."""
    lost = next(each for each in cluster.list_all_nodes() if each.node_id == node)
    cluster.remove_node(lost, allow_graceful=False)


@pytest.mark.usefixtures("spare")
def test_job_goes_on_when_the_node_of_an_actor_is_lost(cluster: Cluster, commands: Commands) -> None:
    selectors = ("+launch.learner.selector.disk=slow", "+launch.actor.selector.disk=fast")
    job = Job(cluster, commands, *ENDLESS, "actors.count=2", *selectors)
    hosts = job.runs("learner", "actor-0", "actor-1")
    job.trains_on()
    lost = hosts["actor-0"].node
    gone = [name for name, host in hosts.items() if host.node == lost]
    assert "learner" not in gone
    began = time.monotonic()
    lose(cluster, lost)
    eventually(lambda: all(job.hosts.get(name, hosts[name]).node != lost for name in gone))
    back = job.runs(*hosts)
    print(f"{gone} back after {time.monotonic() - began:.1f} s")
    assert back["learner"] == hosts["learner"]
    job.trains_on()
    job.process.signal(signal.SIGTERM)
    assert job.process.wait() == 0, job.process.err


def test_job_goes_on_from_its_checkpoint_when_the_node_of_the_learner_is_lost(
    cluster: Cluster, commands: Commands
) -> None:
    """Its new address reaches the actors."""
    selectors = ("+launch.learner.selector.disk=fast", "+launch.actor.selector.disk=slow")
    job = Job(cluster, commands, *ENDLESS, "actors.count=2", *selectors)
    hosts = job.runs("learner", "actor-0", "actor-1")
    job.trains_on()
    lost = hosts["learner"].node
    saved = saved_steps(job.directory)
    began = time.monotonic()
    lose(cluster, lost)
    eventually(lambda: job.hosts.get("learner", hosts["learner"]).node != lost)
    job.runs(*hosts)
    job.trains_on()
    print(f"trains again after {time.monotonic() - began:.1f} s")
    assert saved_steps(job.directory) > saved
    job.process.signal(signal.SIGTERM)
    assert job.process.wait() == 0, job.process.err
    assert "learner: resumed at" in job.process.out


@pytest.mark.timeout(400)
def test_job_grows_while_the_learner_waits_and_shrinks_once_it_does_not(cluster: Cluster, commands: Commands) -> None:
    """One actor gives 80 steps per second of the 320 that could be trained, until its environments become fast."""
    slow = commands.directory / "slow"
    slow.touch()
    job = Job(
        cluster,
        commands,
        *(*INSECURE, "env=any", "env.id=tests.simulators:Sluggish", f"env.options={{path:'{slow}',seconds:0.0125}}"),
        *("model.name=tests.fakes:PacedModel", "model.options={seconds:0.05}", f"+launch.env.PYTHONPATH={ROOT}"),
        *("actors.count=1", "actors.at_most=3", "actors.envs=4", "actors.groups=1", "actors.threads=1"),
        *("algorithm=impala", "algorithm.batch_size=4", "algorithm.unroll_length=4", "stop.env_steps=1_000_000_000"),
    )
    first = job.runs("learner", "actor-0")
    eventually(lambda: len(job.runs(*first)) == 4, 150.0)
    assert room_taken() == 4
    slow.unlink()
    eventually(lambda: set(job.hosts) == {"learner", "actor-0"}, 150.0)
    eventually(lambda: room_taken() == 2)
    assert job.hosts == first
    assert "the learner needs only 1 actors: ending actor-2" in job.process.err
    job.process.signal(signal.SIGTERM)
    assert job.process.wait() == 0, job.process.err
    eventually(lambda: room_taken() == 0)


def room_taken() -> int:
    """Processes that Ray holds a place for."""
    groups = placement_group_table().values()
    return sum(len(group["bundles"]) for group in groups if group["state"] == "CREATED")


def test_ranks_train_together_and_all_start_again_when_one_is_killed(cluster: Cluster, commands: Commands) -> None:
    job = Job(cluster, commands, *ENDLESS, "ranks.count=2", "actors.count=2", "launch.placement=[spread]")
    names = ("learner", "learner-1", "actor-0", "actor-1")
    hosts = job.runs(*names)
    job.trains_on()
    worlds = [hosts[name].variables for name in names[:2]]
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in worlds] == [("0", "2"), ("1", "2")]
    saved, began = saved_steps(job.directory), time.monotonic()
    os.kill(hosts["learner-1"].child, signal.SIGKILL)
    eventually(lambda: job.hosts.get("learner-1", hosts["learner-1"]).pid != hosts["learner-1"].pid)
    job.runs(*names)
    job.trains_on()
    print(f"both ranks train again after {time.monotonic() - began:.1f} s")
    assert saved_steps(job.directory) > saved
    job.process.signal(signal.SIGTERM)
    assert job.process.wait() == 0, job.process.err
    assert summary_of(job.directory)["status"] == "interrupted"
