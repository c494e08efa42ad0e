"""The settings of every command: schema, meanings and the only defaults; YAML holds named choices.

Knows nothing of Hydra: `commands` composes these and hands them down as plain dataclasses. Sizes that follow from
several settings are in `sizes`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.schema import group, key

MISSING = "???"  # how Hydra spells a value that has to be given
RUN = "run directory, which may be a plain word without run=; empty for the newest run"
TOKEN_VARIABLE = "SEEDRL_TOKEN"  # the environment variable to use where there is no token file


class Display(Enum):
    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


class StoreDevice(Enum):
    auto = "auto"
    host = "host"


class Engine(Enum):
    """The engine that starts and restarts the processes of a run."""

    local = "local"
    torchrun = "torchrun"
    ray = "ray"
    kubernetes = "kubernetes"


class Placement(Enum):
    """Constraints on where actors are placed; several can hold at once."""

    collocate = "collocate"
    spread = "spread"


class Activation(Enum):
    tanh = "tanh"
    relu = "relu"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    auto = "auto"


class Format(Enum):
    torch = "torch"
    onnx = "onnx"


@dataclass
class EnvConfig:
    id: str = key(
        "CartPole-v1",
        "envpool id, gymnasium:ID, ale:GAME, openenv:ws://HOST:PORT, your.module:make, or own (own/NAME) if actors "
        "bring the environment",
    )
    options: dict[str, Any] = key({}, "keyword arguments of the environment's constructor, e.g. {episodic_life: true}")
    players: int = key(
        1, "players of one simulation; each counts as an environment of its own, so actors.envs is a multiple of it"
    )
    processes: bool = key(False, "step environments other than envpool's in processes instead of threads")
    wrappers: list[str] = key(
        [], "your.module:Wrapper classes around the pool, innermost first; see docs/environments.md"
    )
    frame_stack: int = key(1, "number of newest frames the policy sees, stacked by the learner along the first axis")
    frame_skip: int = key(1, "simulator frames per step; used in reports only")


MODELS = ("auto", "mlp", "nature", "impala", "grid", "board", "tiny")  # the names of the built-in ones


@dataclass
class ModelConfig:
    name: str = key(
        "auto",
        "mlp | nature | impala | grid | board | tiny | your.module:Class | auto (nature or grid for images, else mlp)",
    )
    layers: list[int] = key([64, 64], "mlp: sizes of its layers")
    activation: Activation = key(Activation.tanh, "mlp: tanh | relu, after each of them")
    separate: bool | None = key(
        None, "give values a network of their own; null: for continuous actions if neither images nor memory are used"
    )
    normalize: bool = key(True, "mlp: normalize observations by their running mean and standard deviation")
    layer_norm: bool = key(False, "normalize the outputs of each layer before its activation; impala: of the last one")
    lstm: int = key(0, "units of an LSTM between the network and its heads; 0 for no LSTM")
    gru: int = key(0, "units of a GRU in place of an LSTM; 0 for no GRU")
    popart: bool = key(True, "normalize value targets adaptively (PopArt), so that rewards can be of any scale")
    squash: bool = key(False, "keep continuous actions within their bounds by tanh instead of clipping")
    state_std: bool = key(
        False, "let the standard deviations of continuous actions depend on the observation, as sac needs it"
    )
    precision: Precision = key(
        Precision.fp32, "of networks for images: fp32 | bf16 (faster, rounded to 8 bits) | auto (bf16 where it is fast)"
    )
    options: dict[str, Any] = key({}, "keyword arguments for your own model class")


@dataclass
class ServingConfig:
    max_slots: int = key(1024, "maximum number of environments served at once; further actors are refused")
    max_rows: int = key(256, "largest batch, in rows")
    min_rows: int = key(1, "smallest batch to run at once, in rows; smaller ones wait up to max_wait")
    max_wait: float = key(0.005, "longest time in seconds that a row waits for min_rows")
    max_silence: float = key(
        120.0, "seconds an actor may take for one step before its session is ended; 0 for no limit"
    )
    max_observation: float = key(
        1e12, "largest absolute value in an observation; a session that sends a larger one is ended; inf for no limit"
    )
    max_reward: float = key(
        1e8, "largest absolute value of a reward; a session that sends a larger one is ended; inf for no limit"
    )
    graphs: bool | None = key(
        None, "record the kernels of a batch once and replay them, as CUDA graphs; null does so if the device is cuda"
    )
    shared_memory: bool = key(
        True, "use shared memory for large observations from actors of the same user on this machine"
    )


@dataclass
class ExplorationConfig:
    """Exploration of the environments that are trained on. Evaluation is greedy whatever is set here."""

    temperature: float = key(
        1.0, "divides logits and multiplies standard deviations; 0 takes the best choice, so that only epsilon explores"
    )
    epsilon: float = key(0.0, "probability of a uniformly random choice")
    epsilon_end: float | None = key(None, "epsilon after the fraction decay, reached linearly; null keeps it constant")
    decay: float = key(0.5, "fraction of stop.env_steps after which epsilon_end is reached")
    ladder: float = key(
        0.0,
        "environment i of the N of each actor has epsilon^(1 + ladder * i / (N - 1)), as in Ape-X, where it is 7; "
        "0 gives all of them the same epsilon",
    )


SELECTORS = ("fifo", "uniform", "priority", "mixed")  # the names of the built-in ones


@dataclass
class PriorityConfig:
    """Settings of `store.select=priority`."""

    alpha: float = key(0.6, "power of priorities in the probability of an unroll; 0 makes all of them alike")
    beta: float = key(0.4, "power of the importance weights; 1 corrects for the choice in full")
    beta_end: float = key(1.0, "beta at stop.env_steps, reached linearly")


@dataclass
class StoreConfig:
    select: str = key(
        "fifo",
        "which unrolls are trained on: fifo (the oldest, each once) | uniform | priority | mixed | your.module:Class",
    )
    options: dict[str, Any] = key({}, "keyword arguments for your own selector class")
    capacity: int = key(
        0, "number of finished unrolls kept; 0 for twice algorithm.batch_size with fifo, else for 64 times"
    )
    min_size: int = key(0, "uniform, priority: unrolls to collect before training begins; 0 for algorithm.batch_size")
    samples_per_insert: float = key(
        0.0, "uniform, priority: times that each unroll is trained on, on average; 0 lets neither side wait"
    )
    tolerance: float = key(
        0.0, "samples that acting or training may be ahead before it waits; 0 for two train batches and one per env"
    )
    max_uses: int = key(0, "not fifo: times that an unroll is trained on at most; 0 for no limit")
    max_staleness: int = key(0, "not fifo: updates after which an unroll is dropped; 0 for no limit")
    priority: PriorityConfig = group(PriorityConfig)
    replay_share: float = key(0.5, "mixed: fraction of each train batch that is replayed; the rest is new")
    checkpoint: bool = key(
        False, "not fifo: keep the unrolls in the newest checkpoint, so that a resumed run need not collect them again"
    )
    device: StoreDevice = key(
        StoreDevice.auto,
        "auto (on the learner's device) | host (in its main memory, for stores that do not fit an accelerator; "
        "observations are uploaded once more for training)",
    )
    dump: str = key("", "directory or URL to record all finished unrolls in, for source= of other runs; empty for none")
    dump_gb: float = key(10.0, "recorded unrolls to keep, in GiB; the oldest are deleted")


@dataclass
class ActorsConfig:
    count: int = key(1, "number of actor processes that `seedrl run` starts")
    envs: int = key(8, "number of environments per actor")
    groups: int = key(2, "groups of environments per actor; while one waits for actions, the others step")
    evaluation: float = key(
        0.0, "fraction of each actor's environments used for evaluation: they act greedily and are never trained on"
    )
    threads: int = key(0, "environment threads per actor that `seedrl run` starts; 0 for one per core")
    max_restarts: int = key(10, "restarts of crashed actors within ten minutes before `seedrl run` gives up")
    at_most: int = key(0, "maximum number of actors when scaling with the learner's demand; 0 keeps actors.count")


class Match(Enum):
    self = "self"
    latest = "latest"
    uniform = "uniform"
    prioritized = "prioritized"
    fixed = "fixed"


@dataclass
class LeagueConfig:
    """Opponents in simulations with several players. See docs/self-play.md."""

    match: Match = key(
        Match.self,
        "opponents: self (the policy plays all sides and learns from all) | latest | uniform | prioritized (snapshots: "
        "the newest, any, rather those it loses to) | fixed (league.opponents only)",
    )
    snapshot_updates: int = key(100, "updates between snapshots of the policy that become opponents; 0 for none")
    snapshots: int = key(10, "number of snapshots to keep on the device, spread over the run")
    current: float = key(0.0, "fraction of opponents that are the current policy itself, which learns from one side")
    opponents: list[str] = key([], "run or checkpoint directories whose policies are opponents as well")


@dataclass
class CheckpointConfig:
    seconds: float = key(60.0, "seconds between checkpoints")
    keep: int = key(3, "number of newest checkpoints to keep")
    keep_best: bool = key(True, "also keep the checkpoint with the best mean return of 100 episodes")
    milestones: int = key(0, "also keep one checkpoint per this many environment steps; 0 for none")


@dataclass
class StopConfig:
    env_steps: int = key(1_000_000, "environment steps to train for, including those before restarts")
    return_mean_100: float | None = key(None, "stop early once the mean return of the last 100 episodes reaches this")


@dataclass
class ReportConfig:
    tensorboard: bool = key(False, "write TensorBoard events into tensorboard/ of the run directory")
    wandb: str = key("", "Weights & Biases project to report to (WANDB_MODE=offline is supported); empty for none")
    video_seconds: float = key(0.0, "seconds between videos of the newest checkpoint, written to videos/; 0 for none")


@dataclass
class SecurityConfig:
    """TLS and tokens. Settings name files only: a secret is never a setting. See docs/security.md."""

    certificate_file: str = key("", "PEM certificate of this process; at the learner it turns TLS on")
    key_file: str = key("", "PEM private key of certificate_file")
    ca_file: str = key(
        "", "PEM certificates to trust; at an actor it turns TLS on, at the learner it requires client certificates"
    )
    token_file: str = key(
        "", "secrets, one per line: a learner accepts any, an actor sends the first; empty for $SEEDRL_TOKEN, if set"
    )
    allow_insecure: bool = key(False, "allow serving and connecting beyond this machine without TLS and a token")
    allow_open_pages: bool = key(
        False, "allow serving the pages of metrics= (and nothing else) beyond this machine without TLS and a token"
    )


@dataclass
class RanksConfig:
    """Several learner processes that train one model together. See docs/scaling.md."""

    count: int = key(1, "number of learner processes, each with its own endpoint, actors and store")
    sync_every: int = key(
        1, "1 averages gradients in every update; k averages weights after every k independent updates"
    )
    separate: bool = key(
        False, "use two processes: rank 0 serves and records, rank 1 trains and sends the weights back"
    )
    advertise: str = key("", "HOST[:PORT] at which actors on other machines reach this rank; empty for listen")
    timeout: float = key(60.0, "seconds without a message from another rank before this rank gives up")


@dataclass
class LearnerConfig:
    """Settings of `seedrl learner` and `seedrl run`."""

    env: EnvConfig = group(EnvConfig)
    model: ModelConfig = group(ModelConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    exploration: ExplorationConfig = group(ExplorationConfig)
    serving: ServingConfig = group(ServingConfig)
    store: StoreConfig = group(StoreConfig)
    actors: ActorsConfig = group(ActorsConfig)
    league: LeagueConfig = group(LeagueConfig)
    ranks: RanksConfig = group(RanksConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    stop: StopConfig = group(StopConfig)
    report: ReportConfig = group(ReportConfig)
    security: SecurityConfig = group(SecurityConfig)
    seed: int = key(1, "random seed of environments, action sampling and initial weights")
    lockstep: bool = key(
        False, "finish every update before the next step, with one actor: runs on CPU are reproducible bit for bit"
    )
    listen: str = key(
        "127.0.0.1:50051", "address to listen on: HOST:PORT or unix:PATH; 127.0.0.1 is local and needs no TLS or token"
    )
    socket: str = key("", "unix:PATH to listen on as well, without TLS; `seedrl run` uses one for its own actors")
    run_dir: str = key("", "run directory; an existing one is resumed; empty for runs/<env>/<time>")
    max_restarts: int = key(5, "restarts of a crashed learner within ten minutes before `seedrl run` gives up")
    source: str = key(
        "", "recorded unrolls (store.dump) to train on without actors, a directory or URL; empty for actors"
    )
    init_from: str = key("", "run or checkpoint directory to load the initial weights from")
    teacher: str = key(
        "", "run or checkpoint directory of a policy that this one is kept close to; algorithm.teacher_*"
    )
    callbacks: list[str] = key([], "your.module:Class of code that follows the run; see docs/algorithms.md")
    callback_options: dict[str, Any] = key({}, "keyword arguments of these classes, by name, e.g. {Class: {key: 1}}")
    device: str = key("auto", "auto | cpu | cuda | cuda:NUMBER")
    threads: int = key(0, "torch threads for inference, and the same number for training; 0 for half the cores each")
    compile: bool = key(
        False,
        "compile the network for training by torch.compile, which takes a minute or more; see docs/accelerator.md",
    )
    display: Display = key(Display.auto, "auto | live | plain | none")
    metrics: str = key(
        "auto", "HOST:PORT of the live page and /metrics; auto for 127.0.0.1:9464 or a free port; empty for none"
    )


@dataclass
class RoleConfig:
    """The resources of one process of a role, for engines that place processes on machines."""

    cpus: float = key(1.0, "cores per process; may be a fraction")
    gpus: float = key(0.0, "accelerators per process; a fraction shares one")
    memory_gb: float = key(0.0, "memory per process in GiB; 0 leaves it to the engine")
    env: dict[str, str] = key({}, "environment variables; they override launch.env and those of this process")
    selector: dict[str, str] = key({}, "labels that the machine must have")


@dataclass
class LaunchConfig:
    """The engine that runs the processes of a job, and its options."""

    engine: Engine = key(Engine.local, "local | torchrun | ray | kubernetes")
    name: str = key("", "name of the job; empty for the environment's name")
    learner: RoleConfig = group(RoleConfig)
    actor: RoleConfig = group(RoleConfig)
    placement: list[Placement] = key(
        [], "collocate: only on machines with a rank; spread: on as many machines as possible; both can be given"
    )
    per_node: int = key(0, "maximum number of actors per machine; 0 for no limit")
    env: dict[str, str] = key({}, "environment variables for every process")
    address: str = key("", "ray: HOST:PORT of the cluster, or auto; empty starts one on this machine")
    security: SecurityConfig = group(SecurityConfig)  # ray: for actors, possibly on other machines
    image: str = key(
        "seedrl", "kubernetes: image name without its -learner or -actor suffix, optionally followed by :TAG"
    )
    namespace: str = key("default", "kubernetes: namespace")
    storage_gb: float = key(10.0, "kubernetes: size of the volume claim for the run directory, in GiB")
    storage_class: str = key(
        "", "kubernetes: storage class of that claim, which all ranks mount; empty for the cluster's default"
    )


@dataclass
class RunConfig(LearnerConfig):
    """Settings of `seedrl run`: a job."""

    launch: LaunchConfig = group(LaunchConfig)
    listen: str = key("", "address the learner listens on: HOST:PORT or unix:PATH; empty for a private unix socket")


@dataclass
class SweepConfig:
    """Many runs on this machine: `seedrl run -m`. See docs/command-line.md."""

    dir: str = key("", "directory of the sweep; an existing one is continued; empty for runs/sweeps/<time>")
    parallel: int = key(1, "number of runs at a time, which share sweep.cores equally")
    cores: int = key(0, "cores of this machine for all runs together; 0 for all of them")
    trials: int = key(0, "number of runs whose values Optuna chooses; 0 runs every combination of the values")
    population: int = key(0, "members of a population, whose weights and values evolve; 0 for none")
    generations: int = key(8, "population: runs of stop.env_steps that each member has, one after the other")
    factor: float = key(1.5, "population: values are multiplied or divided by this where they change")


@dataclass
class SweptRunConfig(RunConfig):
    """Settings of the command `seedrl run`: those of a job, and of a sweep of jobs with -m."""

    sweep: SweepConfig = group(SweepConfig)


@dataclass
class RenderConfig(RunConfig):
    """Settings of `seedrl render`: those of the job, and the directory for its files."""

    out: str = key(MISSING, "directory for the manifests; only files written by `seedrl render` are overwritten")


@dataclass
class ActorConfig:
    """Settings of `seedrl actor`. Everything else comes from the learner."""

    learner: str = key(MISSING, "the learner's address: HOST:PORT or unix:PATH")
    name: str = key("", "name shown in status and logs; empty for host name and process id")
    threads: int = key(0, "environment threads; 0 for one per core")
    patience: float = key(300.0, "seconds to retry without reaching a learner before the actor gives up")
    step_deadline: float = key(60.0, "seconds without progress before the actor abandons the stream and reconnects")
    modules: list[str] = key(
        ["ale", "gymnasium"],
        "Python modules that the learner may ask to import by env.id and env.wrappers, e.g. [gymnasium,mygame]",
    )
    max_env_failures: int = key(10, "restarts of failed environments within ten minutes before the actor exits")
    metrics: str = key("", "HOST:PORT of this actor's /metrics; port 0 for any free port; empty for none")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class StatusConfig:
    """Settings of `seedrl status`."""

    learner: str = key("", "the learner's address: HOST:PORT or unix:PATH")
    run: str = key("", f"{RUN}, unless learner= is given")
    rank: int | None = key(None, "rank of the learner to show; null for rank 0, or the one that serves actor=")
    actor: str = key("", "name of the only actor to show; empty for all of the rank")
    top: int = key(20, "number of actors shown, slowest first")
    json: bool = key(False, "print JSON; --json does the same")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class EvalConfig:
    """Settings of `seedrl eval`."""

    run: str = key("", RUN)
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    episodes: int = key(100, "episodes per seed, divided among the environments in advance")
    seeds: int = key(1, "number of evaluations, each with different environment seeds")
    seed: int = key(1, "first of the seeds; they never coincide with those of training")
    opponent: str = key(
        "", "run or checkpoint directory that plays the other sides, or random; empty lets the run play all of them"
    )
    greedy: bool = key(True, "choose the most likely action; false samples, as in training")
    envs: int = key(0, "environments per actor, at most the number of episodes; 0 for the run's setting")
    actors: int = key(1, "number of actor processes")
    options: dict[str, Any] = key({}, "keyword arguments of the environment to change, e.g. {episodic_life: false}")
    out: str = key("", "JSON file to write; empty for a new file in eval/ of the run directory")
    json: bool = key(False, "print JSON; --json does the same")
    device: str = key("auto", "auto | cpu | cuda | cuda:NUMBER")
    threads: int = key(0, "torch threads; 0 for half the cores")


@dataclass
class ServeConfig:
    """Settings of `seedrl serve`."""

    run: str = key("", RUN)
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    listen: str = key("127.0.0.1:50052", "address to serve on: HOST:PORT or unix:PATH")
    websocket: str = key(
        "", "HOST:PORT to serve WebSocket clients on as well, which send msgpack as OpenPI's do; empty for none"
    )
    greedy: bool = key(True, "choose the most likely action; false samples, as in training")
    watch: bool = key(False, "switch to newer checkpoints as they appear; SIGHUP does so once")
    envs: int = key(0, "environments offered to a client, which may use fewer; 0 for the run's setting")
    max_slots: int = key(256, "maximum number of environments served at once; further clients are refused")
    max_silence: float = key(0.0, "seconds a client may take for one step before its session is ended; 0 for no limit")
    metrics: str = key("", "HOST:PORT of /metrics, /healthz and /readyz; port 0 for any free port; empty for none")
    seed: int = key(1, "random seed of action sampling and of the environments of `seedrl actor`")
    device: str = key("auto", "auto | cpu | cuda | cuda:NUMBER")
    threads: int = key(0, "torch threads; 0 for half the cores")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class ControlConfig:
    """Settings of `seedrl control`."""

    do: list[str] = key(
        [], "pause | resume | reset | drain | move | open, written as a plain word: seedrl control pause"
    )
    actor: str = key("", "name of the actor; empty for all actors, including those that join later")
    rank: int | None = key(None, "rank of the learner whose actors are meant; null for the actors of every rank")
    temperature: float | None = key(None, "exploration: divides logits and multiplies standard deviations; 1 for none")
    epsilon: float | None = key(None, "exploration: probability of a uniformly random choice; 0 for none")
    options: dict[str, Any] = key({}, "keyword arguments of the environments to change; the environments are recreated")
    learner: str = key("", "the learner's address: HOST:PORT or unix:PATH")
    run: str = key("", f"{RUN}, unless learner= is given")
    json: bool = key(False, "print the result for each member as JSON")
    security: SecurityConfig = group(SecurityConfig)


@dataclass
class DoctorConfig(RunConfig):
    """Settings of `seedrl doctor`: those of the run to check, or the address of one that is running."""

    learner: str = key("", "address of a running learner to examine: HOST:PORT or unix:PATH")
    run: str = key("", "run directory of a running learner to examine, or a plain word: seedrl doctor RUN")


@dataclass
class CheckConfig(RunConfig):
    """Settings of `seedrl check`: those of the run whose environment, and code of one's own, is examined."""

    steps: int = key(1000, "steps of one environment to take")
    json: bool = key(False, "print the findings as JSON")


@dataclass
class BenchConfig:
    """Settings of `seedrl bench`."""

    stage: str = key("all", "all, or one of the stages in bench/README.md, from pool to peers")
    seconds: float = key(1.0, "seconds per measurement of one side")
    repeats: int = key(5, "measurements per side; ratios are medians over them")
    tasks: list[str] = key(
        ["cartpole", "catch"], "learning: presets to train; pong takes a quarter of an hour per seed"
    )
    seeds: int = key(3, "learning: runs per task")
    runs: str = key("", "learning: directory to keep the runs in, which resumes what was interrupted; empty for none")
    out: str = key("", "JSON file to write the results to")


@dataclass
class ObserveConfig:
    """Settings of `seedrl observe`."""

    metrics: Any = key("127.0.0.1:9464", "HOST:PORT of a learner's metrics; a list for several: [HOST:PORT,HOST:PORT]")
    listen: str = key("127.0.0.1:9090", "HOST:PORT on which Prometheus listens")
    data: str = key("", "directory for Prometheus' data; empty for seedrl/prometheus in the user's cache")


@dataclass
class CertsConfig:
    """Settings of `seedrl certs`."""

    out: str = key("certs", "output directory; existing files are not overwritten")
    hosts: list[str] = key(["localhost", "127.0.0.1"], "host names and addresses at which actors reach the learner")
    days: int = key(365, "number of days for which the certificates are valid")


@dataclass
class PlotConfig:
    """Settings of `seedrl plot`."""

    runs: list[str] = key(
        [],
        "run directories, or directories that contain some, as plain words: seedrl plot A B; empty for the newest",
    )
    references: dict[str, float] = key({}, "returns to compare with, drawn as lines, by name, e.g. {CleanRL: 415}")
    out: str = key("compare.png", "file to write; .pdf and .svg are supported as well")


@dataclass
class ExportConfig:
    """Settings of `seedrl export`."""

    run: str = key("", RUN)
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    format: Format = key(Format.torch, "torch (a .pt2 file, by torch.export) | onnx")
    out: str = key("", "file to write; empty for policy.pt2 or policy.onnx in the run directory")


@dataclass
class RecordConfig:
    """Settings of `seedrl record`."""

    run: str = key("", RUN)
    checkpoint: str = key("newest", "newest | best | the name or directory of a checkpoint")
    episodes: int = key(4, "number of episodes to play, with the most likely action in every step")
    out: str = key(
        "", "output path without suffix (.mp4, .gif and .png are added); empty for videos/<steps> in the run directory"
    )
    seed: int = key(1_000_003, "random seed of the environment; differs from those of training")
    max_steps: int = key(5_000, "maximum number of steps per episode")
    fps: int = key(30, "frames per second of the video")
    size: int = key(480, "approximate length of the longer side in pixels; frames are scaled by whole factors")


@dataclass
class CardConfig:
    """Settings of `seedrl card`."""

    run: str = key("", f"{RUN}; the card is written there as card.md")
    upload: str = key(
        "", "Hugging Face hub repository (USER/NAME) to upload the card, policy, curve and videos to; empty for none"
    )
    private: bool = key(False, "make the repository private if it is created")
