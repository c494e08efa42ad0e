"""The settings of every command: schema, defaults and meanings. The only defaults there are; YAML holds named choices.

Knows nothing of Hydra; `commands` composes these and hands them down as plain dataclasses.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.schema import group, key

MISSING = "???"  # how Hydra spells a value that has to be given
OWN = "own"  # env.id of environments that actors bring; own/NAME gives them a name
TOKEN_VARIABLE = "SEEDRL_TOKEN"  # the environment's, for whoever has no token file


class Display(Enum):
    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Engine(Enum):
    """What starts the processes of a run and restarts them."""

    local = "local"
    torchrun = "torchrun"
    ray = "ray"
    kubernetes = "kubernetes"


class Placement(Enum):
    """Where actors go; several hold at once."""

    collocate = "collocate"
    spread = "spread"


class Format(Enum):
    torch = "torch"
    onnx = "onnx"


@dataclass
class EnvConfig:
    id: str = key("CartPole-v1", "envpool id, gymnasium:ID, your.module:make, or own (own/NAME): actors bring it")
    options: dict[str, Any] = key({}, "keyword arguments of its constructor, e.g. {episodic_life: true}")
    processes: bool = key(False, "step environments that are not envpool's in processes instead of threads")
    wrappers: list[str] = key([], "your.module:Wrapper around the pool, innermost first; envs_server/pool.py says how")
    frame_stack: int = key(1, "newest frames the policy sees at once, stacked by the learner along the first axis")
    frame_skip: int = key(1, "simulator frames per step; for reports only")


@dataclass
class ModelConfig:
    name: str = key(
        "auto", "mlp | nature | impala | grid | tiny | your.module:Class | auto (nature or grid for images, else mlp)"
    )
    layers: list[int] = key([64, 64], "layer sizes of mlp")
    normalize: bool = key(False, "mlp: observations minus their running mean, in running standard deviations")
    lstm: int = key(0, "units of an LSTM between the network and its heads; 0 for none")
    gru: int = key(0, "units of a GRU instead")
    popart: bool = key(False, "values in running units of their targets (PopArt), so that rewards may have any size")
    squash: bool = key(False, "actions that are amounts come within their bounds by tanh instead of by clipping")
    options: dict[str, Any] = key({}, "keyword arguments for your own model class")


@dataclass
class ServingConfig:
    max_slots: int = key(1024, "environments served at once; further actors are refused")
    max_rows: int = key(256, "rows of a full batch")
    min_rows: int = key(1, "rows worth waking an idle device for; fewer wait up to max_wait")
    max_wait: float = key(0.005, "seconds the oldest row waits for min_rows")
    max_silence: float = key(120.0, "seconds an actor may take for a step before it is sent away; 0 for any time")
    shared_memory: bool = key(True, "actors of this user on this machine put large observations into shared memory")


@dataclass
class StoreConfig:
    select: str = key("fifo", "which unrolls are trained on: fifo (the oldest, each once) | your.module:Class")
    options: dict[str, Any] = key({}, "keyword arguments for your own selector class")
    capacity: int = key(0, "finished unrolls kept for training; 0 for twice algorithm.batch_size")


@dataclass
class ActorsConfig:
    count: int = key(1, "actor processes started by `seedrl run`")
    envs: int = key(32, "environments of each actor")
    groups: int = key(2, "groups of environments in flight per actor, so that stepping overlaps inference")
    evaluation: float = key(
        0.0, "share of each actor's environments that act greedily, are reported apart and never trained on"
    )
    threads: int = key(0, "environment threads of each actor started by `seedrl run`; 0 for one per core")
    max_restarts: int = key(10, "times within ten minutes that `seedrl run` restarts crashed actors before it gives up")
    at_most: int = key(0, "actors may grow to so many and shrink back to count, as the learner needs; 0 for count")


@dataclass
class CheckpointConfig:
    seconds: float = key(60.0, "seconds between checkpoints")
    keep: int = key(3, "newest checkpoints kept")
    keep_best: bool = key(True, "keep the one with the best mean return of 100 episodes as well")
    milestones: int = key(0, "keep the first one of every so many environment steps as well; 0 for none")


@dataclass
class StopConfig:
    env_steps: int = key(1_000_000, "environment steps to train for, over all restarts")
    return_mean_100: float | None = key(None, "stop early when the mean return of the last 100 episodes reaches this")


@dataclass
class ReportConfig:
    tensorboard: bool = key(False, "write TensorBoard events into tensorboard/ of the run directory")
    wandb: str = key("", "Weights & Biases project to report to; WANDB_MODE=offline works; empty for none")
    video_seconds: float = key(0.0, "seconds between videos of the newest checkpoint, into videos/; 0 for none")


@dataclass
class SecurityConfig:
    """Who may talk to whom. Names files only: a secret is never a setting. docs/security.md has the whole of it."""

    certificate_file: str = key("", "PEM certificate this side shows; the learner's turns TLS on")
    key_file: str = key("", "PEM private key of certificate_file")
    ca_file: str = key(
        "", "PEM certificates to trust: an actor's turns TLS on, the learner's demands certificates of actors"
    )
    token_file: str = key(
        "", "secrets, one a line: a learner takes any, an actor shows the first; empty for SEEDRL_TOKEN, if that is set"
    )
    allow_insecure: bool = key(False, "serve and connect beyond this machine without TLS and token as well")
    allow_open_pages: bool = key(False, "serve only the pages of metrics= beyond this machine without TLS and token")


@dataclass
class RanksConfig:
    """Several learner processes that train one model together. docs/scaling.md has the whole of it."""

    count: int = key(1, "learner processes, each with an endpoint, actors and a store of its own")
    sync_every: int = key(1, "1 averages gradients in every update; k averages weights after k updates of one's own")
    separate: bool = key(False, "two processes: rank 0 serves and records, rank 1 trains and sends the weights back")
    advertise: str = key("", "HOST[:PORT] by which actors of other machines reach this rank; empty for listen")
    timeout: float = key(60.0, "seconds without a word of another rank until a rank gives up")


@dataclass
class LearnerConfig:
    """Settings of `seedrl learner` and `seedrl run`."""

    env: EnvConfig = group(EnvConfig)
    model: ModelConfig = group(ModelConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    serving: ServingConfig = group(ServingConfig)
    store: StoreConfig = group(StoreConfig)
    actors: ActorsConfig = group(ActorsConfig)
    ranks: RanksConfig = group(RanksConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    stop: StopConfig = group(StopConfig)
    report: ReportConfig = group(ReportConfig)
    security: SecurityConfig = group(SecurityConfig)
    seed: int = key(1, "decides environments, sampling and initial weights")
    lockstep: bool = key(False, "one actor, every update before the next step: a run repeats bit for bit on CPU")
    listen: str = key("127.0.0.1:50051", "address the learner serves on: HOST:PORT or unix:PATH")
    socket: str = key("", "unix:PATH served besides listen, without TLS; `seedrl run` has one for its own actors")
    run_dir: str = key("", "the run's directory; an existing one is resumed; empty for runs/<env>/<time>")
    max_restarts: int = key(
        5, "times within ten minutes that `seedrl run` restarts a crashed learner before it gives up"
    )
    init_from: str = key("", "run or checkpoint directory to take the initial weights from")
    device: Device = key(Device.auto, "auto | cpu | cuda")
    threads: int = key(0, "torch threads of inference and of training; 0 for half the cores each")
    display: Display = key(Display.auto, "auto | live | plain | none")
    metrics: str = key(
        "auto", "HOST:PORT of the live page and of /metrics; auto for 127.0.0.1:9464 or any free port; empty for none"
    )


@dataclass
class RoleConfig:
    """What one process of a role needs, where machines are shared out by an engine."""

    cpus: float = key(1.0, "cores, or a fraction of one")
    gpus: float = key(0.0, "accelerators; a fraction shares one")
    memory_gb: float = key(0.0, "GiB of memory; 0 leaves it to the engine")
    env: dict[str, str] = key({}, "environment variables, over those of launch.env and of this process")
    selector: dict[str, str] = key({}, "labels that its machine has to have")


@dataclass
class LaunchConfig:
    """Which engine runs the processes of a job, and where."""

    engine: Engine = key(Engine.local, "local | torchrun | ray | kubernetes")
    name: str = key("", "name of the job; empty for the environment's")
    learner: RoleConfig = group(RoleConfig)
    actor: RoleConfig = group(RoleConfig)
    placement: list[Placement] = key(
        [], "collocate puts actors only where a rank is; spread uses as many machines as possible; both may be given"
    )
    per_node: int = key(0, "most actors on one machine; 0 for any number")
    env: dict[str, str] = key({}, "environment variables of every process")
    address: str = key("", "ray: HOST:PORT of a cluster, or auto; empty for a new one on this machine")
    security: SecurityConfig = group(SecurityConfig)  # ray: of actors, which may be on other machines than the learner
    image: str = key("seedrl", "kubernetes: image without the ending -learner or -actor, and its tag after a colon")
    namespace: str = key("default", "kubernetes: namespace")
    storage_gb: float = key(10.0, "kubernetes: GiB of the claim for the run directory")
    storage_class: str = key(
        "", "kubernetes: storage class of that claim, which several ranks mount at once; empty for the cluster's"
    )


@dataclass
class RunConfig(LearnerConfig):
    """Settings of `seedrl run`: a job."""

    launch: LaunchConfig = group(LaunchConfig)
    listen: str = key("", "address the learner serves on: HOST:PORT or unix:PATH; empty for a private unix socket")


@dataclass
class RenderConfig(RunConfig):
    """Settings of `seedrl render`: the job, and where its files go."""

    out: str = key(MISSING, "directory for the manifests; only files that `seedrl render` wrote are overwritten")


@dataclass
class ActorConfig:
    """Settings of `seedrl actor`. The learner tells the rest."""

    learner: str = key(MISSING, "the learner's address: HOST:PORT or unix:PATH")
    name: str = key("", "name shown to people; empty for host and process id")
    threads: int = key(0, "environment threads; 0 for one per core")
    patience: float = key(300.0, "seconds without a learner before the actor gives up")
    step_deadline: float = key(60.0, "seconds without any progress before the stream is given up")
    modules: list[str] = key(
        ["gymnasium"],
        "Python modules that the learner may name in env.id and env.wrappers, e.g. [gymnasium,mygame]",
    )
    max_env_failures: int = key(10, "times within ten minutes that failed environments are made anew before it ends")
    metrics: str = key("", "HOST:PORT of this actor's own /metrics, port 0 for any free one; empty for none")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class StatusConfig:
    """Settings of `seedrl status`."""

    learner: str = key("", "the learner's address: HOST:PORT or unix:PATH")
    run: str = key("", "run directory of the learner; without it and learner=, the newest below runs/")
    top: int = key(20, "actors shown, slowest first")
    json: bool = key(False, "print JSON instead; --json does the same")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class EvalConfig:
    """Settings of `seedrl eval`."""

    run: str = key(MISSING, "the run directory")
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    episodes: int = key(100, "episodes of each seed, their number fixed for each environment beforehand")
    seeds: int = key(1, "times to evaluate, each with other environments")
    seed: int = key(1, "the first of the seeds; none of them is like one of training")
    greedy: bool = key(True, "take the likeliest action; false samples, as in training")
    envs: int = key(0, "environments of each actor; 0 for the run's; no more than there are episodes for")
    actors: int = key(1, "actor processes")
    options: dict[str, Any] = key({}, "other keyword arguments of the environment, e.g. {episodic_life: false}")
    out: str = key("", "JSON file to write; empty for one of its own in eval/ of the run directory")
    json: bool = key(False, "print JSON instead of a few lines; --json does the same")
    device: Device = key(Device.auto, "auto | cpu | cuda")
    threads: int = key(0, "torch threads; 0 for half the cores")


@dataclass
class ServeConfig:
    """Settings of `seedrl serve`."""

    run: str = key(MISSING, "the run directory")
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    listen: str = key("127.0.0.1:50052", "address to serve on: HOST:PORT or unix:PATH")
    greedy: bool = key(True, "take the likeliest action; false samples, as in training")
    watch: bool = key(False, "serve a newer checkpoint as soon as there is one; SIGHUP asks for it once")
    envs: int = key(0, "environments that a client is told to have, and may have less of; 0 for the run's")
    max_slots: int = key(256, "environments served at once; further clients are refused")
    max_silence: float = key(0.0, "seconds a client may take for a step before it is sent away; 0 for any time")
    metrics: str = key("", "HOST:PORT of /metrics, /healthz and /readyz, port 0 for any free one; empty for none")
    seed: int = key(1, "of sampled actions, and of environments of our own actors")
    device: Device = key(Device.auto, "auto | cpu | cuda")
    threads: int = key(0, "torch threads; 0 for half the cores")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class ControlConfig:
    """Settings of `seedrl control`."""

    do: list[str] = key([], "pause | resume | reset | drain | move | open, as a word of its own: seedrl control pause")
    actor: str = key("", "name of the actor; empty for all of them, and those to come")
    temperature: float | None = key(None, "exploration: logits are divided by it, deviations multiplied; 1 for none")
    epsilon: float | None = key(None, "exploration: share of choices made at random; 0 for none")
    options: dict[str, Any] = key({}, "other keyword arguments of the environments, which are made anew with them")
    learner: str = key("", "the learner's address: HOST:PORT or unix:PATH")
    run: str = key("", "run directory of the learner; without it and learner=, the newest below runs/")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class DoctorConfig(RunConfig):
    """Settings of `seedrl doctor`: those of the run it checks, or where to find the run it looks at."""

    learner: str = key("", "address of a running learner to examine: HOST:PORT or unix:PATH")
    run: str = key("", "run directory of a running learner to examine")


@dataclass
class BenchConfig:
    """Settings of `seedrl bench`."""

    stage: str = key("all", "all, or one of the stages in bench/README.md, from pool to peers")
    seconds: float = key(1.0, "length of one turn of one side")
    repeats: int = key(5, "turns of each side; ratios are medians over them")
    tasks: list[str] = key(["cartpole", "catch"], "learning: presets to train; pong takes a quarter of an hour a seed")
    seeds: int = key(3, "learning: runs of each task")
    out: str = key("", "JSON file to write the results to")


@dataclass
class ObserveConfig:
    """Settings of `seedrl observe`."""

    metrics: Any = key("127.0.0.1:9464", "where a learner shows its metrics; several as [HOST:PORT,HOST:PORT]")
    listen: str = key("127.0.0.1:9090", "HOST:PORT of the Prometheus that is started")
    data: str = key("", "directory of what it has seen; empty for seedrl/prometheus in the user's cache")


@dataclass
class CertsConfig:
    """Settings of `seedrl certs`."""

    out: str = key("certs", "directory to make; nothing in it is overwritten")
    hosts: list[str] = key(["localhost", "127.0.0.1"], "names and addresses by which actors reach the learner")
    days: int = key(365, "how long the certificates are valid")


@dataclass
class PlotConfig:
    """Settings of `seedrl plot`."""

    runs: list[str] = key([], "run directories, or directories that hold some; as words of their own: seedrl plot A B")
    out: str = key("compare.png", "the plot's file; .pdf and .svg work as well")


@dataclass
class ExportConfig:
    """Settings of `seedrl export`."""

    run: str = key(MISSING, "the run directory")
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    format: Format = key(Format.torch, "torch (.pt2, by torch.export) | onnx")
    out: str = key("", "the file to write; empty for policy.pt2 or policy.onnx in the run directory")


@dataclass
class RecordConfig:
    """Settings of `seedrl record`."""

    run: str = key(MISSING, "the run directory")
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    episodes: int = key(4, "episodes to play, each step with the likeliest action")
    out: str = key(
        "", "the video without its ending: .mp4, .gif and .png; empty for videos/<steps> of the run directory"
    )
    seed: int = key(1_000_003, "of the environment: not the one it was trained with")
    max_steps: int = key(5_000, "steps after which an episode is cut short")
    fps: int = key(30, "frames per second")
    size: int = key(480, "pixels of the longer side, about: smaller frames are enlarged, larger ones thinned")


@dataclass
class CardConfig:
    """Settings of `seedrl card`."""

    run: str = key(MISSING, "the run directory; the card is written there as card.md")
    upload: str = key("", "repository of the Hugging Face hub to upload card, policy, curve and videos to: USER/NAME")
    private: bool = key(False, "make that repository a private one, if it is new")


def modules_of(env_id: str, wrappers: Iterable[str]) -> list[str]:
    """Python modules that actors have to import for an environment."""
    paths = [*([env_id] if ":" in env_id else []), *wrappers]
    return [path.partition(":")[0] for path in paths]


def is_own(env_id: str) -> bool:
    """Whether actors bring the environment."""
    return env_id.partition("/")[0] == OWN


def group_size(config: LearnerConfig) -> int:
    """Environments per request. A lock-step run has one group, so that rows always come in the same order."""
    return config.actors.envs if config.lockstep else config.actors.envs // config.actors.groups


def serving_ranks(config: LearnerConfig) -> int:
    """Ranks that actors stream to."""
    return 1 if config.ranks.separate else config.ranks.count


def evaluation_envs(actors: ActorsConfig) -> list[int]:
    """Which environments of an actor are for evaluation: some from all over, and at least one if there is a share."""
    count = max(1, round(actors.evaluation * actors.envs)) if actors.evaluation else 0
    return [number * actors.envs // count for number in range(count)]


def available_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_threads(config: LearnerConfig) -> int:
    """Of inference, and as many of training."""
    return config.threads or max(1, available_cores() // 2)


def store_capacity(config: LearnerConfig) -> int:
    """Return how many finished unrolls the store keeps."""
    return config.store.capacity or 2 * config.algorithm.batch_size
