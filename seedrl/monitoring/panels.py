"""The tiles and panels of all dashboards, declared once, each with its PromQL. Knows no dashboard.

`dashboards.py` makes the Grafana dashboard and the Prometheus console from it. In a query, `$window` is the time that a
rate is taken over; metrics are named without the learner, which is added later. In a legend, {label} is its value.
"""

from dataclasses import dataclass
from enum import Enum

from seedrl.metrics import BATCH_STAGES


class Unit(Enum):
    """The unit of a number, which decides how it is formatted."""

    number = "number"
    per_second = "per second"
    per_minute = "per minute"
    seconds = "seconds"
    share = "share"  # 1 is shown as 100 %
    bytes = "bytes"
    bytes_per_second = "bytes per second"
    word = "word"  # the label `what` is shown instead of the number


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that answer one question."""

    title: str
    question: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One large number. Beyond `warn` and `bad` it changes its colour; `low` means that less is worse."""

    title: str
    description: str
    unit: Unit
    query: str
    warn: float | None = None
    bad: float | None = None
    low: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that belong together."""

    title: str
    row: Section
    description: str
    unit: Unit
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    stacked: bool = False
    min: float | None = 0.0
    max: float | None = None


LEARNING = Section("Learning", "Is it learning?")
THROUGHPUT = Section("Throughput", "How fast?")
TIME = Section("Where time goes", "What is the bottleneck?")
BATCHING = Section("Batching", "Are batches full, and what waits for them?")
AGE = Section("Data age", "How stale is the data it learns from?")
ACTORS = Section("Actors", "Which actors are slow or gone?")
SAFETY = Section("Safety", "Is anything dropped, skipped or unsaved?")
ROWS = (LEARNING, THROUGHPUT, TIME, BATCHING, AGE, ACTORS, SAFETY)


def rate(counter: str) -> str:
    return f"rate(seedrl_{counter}[$window])"


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {rate(histogram + '_bucket')})"


def of_last(share: float, what: str) -> str:
    """Return the query for a true quantile of the last 100 episodes, of their return or length."""
    return f'seedrl_{what}_quantile{{quantile="{share}"}}'


def total(labelled: str) -> str:
    """Return the query for a labelled counter's rate over all of its labels."""
    return f"sum by (job, instance) ({rate(labelled + '_total')})"


def shares(labelled: str) -> str:
    """Return the query for a labelled counter's rates as parts of 1."""
    return f"{rate(labelled + '_total')} / on (job, instance) group_left {total(labelled)}"


# Where a request is, from one of its answers to the next. Little's law: requests in circulation = their rate × the time
# each takes. Actors measure the round trip, the learner its part of it, so the rest is environments and network.
REQUESTS = rate("act_latency_seconds_count")
LATENCY = mean("act_latency_seconds")
ROUND_TRIP = f"{rate('actors_round_trip_seconds_total')} / {rate('actors_requests_total')}"
IN_ENVIRONMENTS = f"clamp_min(seedrl_groups / {REQUESTS} - {ROUND_TRIP}, 0)"
TRAVEL = f"clamp_min({ROUND_TRIP} - {LATENCY}, 0)"
# A request that comes while a batch runs is read only afterwards: it has arrived and waits for inference.
BATCHES = "|".join(BATCH_STAGES)
IN_BATCHES = f'sum by (job, instance) (rate(seedrl_serving_seconds_total{{stage=~"{BATCHES}"}}[$window]))'
IN_NETWORK = f"{TRAVEL} * clamp_min(1 - {IN_BATCHES}, 0)"
UNREAD = f"{TRAVEL} * clamp_max({IN_BATCHES}, 1)"
IN_QUEUE = f"{rate('queue_seconds_total')} / on (job, instance) group_left {REQUESTS}"
IN_INFERENCE = f"clamp_min({LATENCY} - {total('queue_seconds')} / {REQUESTS}, 0) + {UNREAD}"


WAIT_SHARE = rate('learner_seconds_total{stage="wait"}') + f" / ignoring (stage) {total('learner_seconds')}"


def waiting(cause: str) -> str:
    """Return the query for the mean time that requests wait for a cause of `seedrl_queue_seconds_total`."""
    return "sum by (job, instance) ({}) / {}".format(rate(f'queue_seconds_total{{cause="{cause}"}}'), REQUESTS)


def called(word: str, query: str) -> str:
    return f'label_replace({query}, "what", "{word}", "", "")'


# As monitoring/diagnosis.py has it: a learner that waits less than a tenth of its time is the limit itself; else the
# largest part of a request's cycle is.
PARTS = " or ".join(
    (
        called("env", IN_ENVIRONMENTS),
        called("network", IN_NETWORK),
        called("store", waiting("hold")),
        called("batching", waiting("fill")),
        called("inference", f"clamp_min({LATENCY} - {waiting('hold')} - {waiting('fill')}, 0) + {UNREAD}"),
    )
)
BOTTLENECK = (
    called("paused", "seedrl_sessions_paused / seedrl_sessions_open > 0")
    + " or on (job, instance) "
    + called("learner", f"1 - ({WAIT_SHARE} < 0.1)")
    + " or on (job, instance) "
    f"topk by (job, instance) (1, {PARTS}) / on (job, instance) group_left () (seedrl_groups / {REQUESTS})"
)

TILES = (
    Tile("Steps per second", "Transitions of environments, all actors together", Unit.number, rate("env_steps_total")),
    Tile(
        "Return",
        "Mean of the last 100 episodes, or of all so far, unclipped and undiscounted",
        Unit.number,
        "seedrl_return_mean",
    ),
    Tile(
        "Bottleneck",
        "The learner, if it hardly ever waits, which is the best case; paused, if actors are. Otherwise the part of "
        "its cycle in which a request spends most time, and the share: env, network, store (actors are held back), "
        "batching or inference",
        Unit.word,
        BOTTLENECK,
    ),
    Tile(
        "Learner waits",
        "Share of its time in which the learner thread waits for unrolls; if it is high, acting is the limit",
        Unit.share,
        WAIT_SHARE,
    ),
    Tile("Policy lag", "Mean updates between acting and training", Unit.number, mean("policy_lag")),
    Tile("Actors", "Actors connected", Unit.number, "seedrl_sessions_open", warn=1, bad=1, low=True),
    Tile(
        "Rows dropped",
        "Share of rows that are not trained on because their session ended",
        Unit.share,
        f"{total('rows_dropped')} / {rate('rows_total')}",
        warn=0.001,
        bad=0.01,
    ),
)

PANELS = (
    Panel(
        "Return",
        LEARNING,
        "Mean of the last 100 episodes, or of all so far, undiscounted and unclipped. If it is flat or falls, the "
        "learner's own page and seedrl status tell why, as far as can be known, and which setting to try.",
        Unit.number,
        (("seedrl_return_mean", "training"), ("seedrl_eval_return_mean", "evaluation")),
        min=None,
    ),
    Panel(
        "Spread of returns",
        LEARNING,
        "Quantiles of the last 100 episodes, or of all so far. Half of them lie above p50.",
        Unit.number,
        tuple((of_last(share, "return"), f"p{share * 100:.0f}") for share in (0.9, 0.5, 0.1)),
        min=None,
    ),
    Panel(
        "Reward per step",
        LEARNING,
        "Mean reward of the steps of the last seconds, unclipped. It tells something before the first episode ends.",
        Unit.number,
        (("seedrl_reward_per_step", "reward"),),
        min=None,
    ),
    Panel(
        "Does it learn?",
        LEARNING,
        "The verdict of the learner, which its own page and seedrl status explain: good, bad, or open, which is "
        "neither, or too early to tell.",
        Unit.number,
        tuple((f'seedrl_learning{{mood="{mood}"}}', mood) for mood in ("open", "bad", "good")),
        stacked=True,
        max=1.0,
    ),
    Panel(
        "Episode length",
        LEARNING,
        "Mean steps of the episodes that ended in the window, and the quantile of the last 100 episodes.",
        Unit.number,
        ((mean("episode_length"), "mean"), (of_last(0.9, "length"), "p90 of 100")),
    ),
    Panel(
        "Episodes per minute",
        LEARNING,
        "Finished episodes per minute. The number falls when episodes become longer.",
        Unit.per_minute,
        ((f"60 * {rate('episodes_total')}", "episodes"),),
    ),
    Panel(
        "What the algorithm reports",
        LEARNING,
        "Every number that the algorithm reports about a recent update, such as the parts of its loss. The level of a "
        "loss says little; a jump says more. Click on a name to see its curve alone.",
        Unit.number,
        (("seedrl_algorithm", "{value}"),),
        min=None,
    ),
    Panel(
        "Gradient norm",
        LEARNING,
        "The norm of the gradient before it is clipped to algorithm.max_grad_norm.",
        Unit.number,
        (("seedrl_grad_norm", "norm"),),
    ),
    Panel(
        "Learning rate",
        LEARNING,
        "The step size of the optimizer. It falls linearly to algorithm.learning_rate_end if that is set.",
        Unit.number,
        (("seedrl_learning_rate", "learning rate"),),
    ),
    Panel(
        "Steps per second",
        THROUGHPUT,
        "Steps acted by all actors, and steps trained on by the learner. Resets are trained on and not acted, so short "
        "episodes lift the second a little above the first.",
        Unit.per_second,
        ((rate("env_steps_total"), "acted"), (rate("trained_steps_total"), "trained")),
    ),
    Panel(
        "Updates per second",
        THROUGHPUT,
        "Optimizer steps, skipped ones included.",
        Unit.per_second,
        ((rate("updates_total"), "updates"),),
    ),
    Panel(
        "Simulator frames per second",
        THROUGHPUT,
        "Steps times env.frame_skip, which is what papers report.",
        Unit.per_second,
        ((rate("frames_total"), "frames"),),
    ),
    Panel(
        "Steps so far",
        THROUGHPUT,
        "Steps over all restarts of the run, which ends at stop.env_steps.",
        Unit.number,
        (("seedrl_env_steps_total", "acted"), ("seedrl_trained_steps_total", "trained")),
    ),
    Panel(
        "Cycle of a request",
        TIME,
        "Mean time from one answer to the next of a group of environments, and where it is spent (Little's law: groups "
        "in circulation / requests per second). The thickest band is the bottleneck. Environments: add actors or "
        "cores. Network: raise actors.groups. Hold: training is too slow for the data. Fill: lower serving.min_rows. "
        "Busy and inference: choose a smaller model or a faster device.",
        Unit.seconds,
        (
            (IN_ENVIRONMENTS, "env"),
            (IN_NETWORK, "network"),
            (IN_QUEUE, "{cause}"),
            (IN_INFERENCE, "inference"),
        ),
        stacked=True,
    ),
    Panel(
        "Server thread",
        TIME,
        "Seconds per second in each stage. If there is no idle time, inference is the limit; if there is much hold, "
        "training is.",
        Unit.share,
        ((rate("serving_seconds_total"), "{stage}"),),
        stacked=True,
        max=1.0,
    ),
    Panel(
        "Learner thread",
        TIME,
        "Shares of the learner thread's time. If it waits much, acting is the limit and training has time to spare.",
        Unit.share,
        ((shares("learner_seconds"), "{stage}"),),
        stacked=True,
        max=1.0,
    ),
    Panel(
        "Cores in use",
        TIME,
        "CPU seconds per second of the learner process, and of all actors together as they report it.",
        Unit.number,
        (("rate(process_cpu_seconds_total[$window])", "learner"), (rate("actors_cpu_seconds_total"), "actors")),
    ),
    Panel(
        "Rows per batch",
        BATCHING,
        "Rows that share a forward pass. Quantiles are interpolated between powers of two: trust the mean.",
        Unit.number,
        (
            (mean("batch_rows"), "mean"),
            *((quantile(share, "batch_rows"), f"p{share * 100:.0f}") for share in (0.5, 0.9)),
        ),
    ),
    Panel(
        "Batch fill",
        BATCHING,
        "Mean rows of a batch over serving.max_rows. If batches are always full, raise serving.max_rows. If they are "
        "nearly empty on a GPU, add environments.",
        Unit.share,
        ((f"{mean('batch_rows')} / seedrl_batch_rows_limit", "fill"),),
        max=1.0,
    ),
    Panel(
        "Forward passes per second",
        BATCHING,
        "Batches that inference runs per second.",
        Unit.per_second,
        ((rate("batches_total"), "batches"),),
    ),
    Panel(
        "Wait in the queue",
        BATCHING,
        "Time a request waits before its batch runs.",
        Unit.seconds,
        tuple((quantile(share, "queue_wait_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99)),
    ),
    Panel(
        "Time to an answer",
        BATCHING,
        "From reading a request to its answer, in the learner.",
        Unit.seconds,
        tuple((quantile(share, "act_latency_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99)),
    ),
    Panel(
        "Rows waiting",
        BATCHING,
        "Rows that wait for inference at the moment of the scrape.",
        Unit.number,
        (("seedrl_waiting_rows", "rows"),),
    ),
    Panel(
        "Policy lag",
        AGE,
        "Updates between acting and training. To lower it: a smaller store.capacity, fewer environments, or a larger "
        "algorithm.batch_size. A replay memory is meant to hold old data.",
        Unit.number,
        (
            (mean("policy_lag"), "mean"),
            *((quantile(share, "policy_lag"), f"p{share * 100:.0f}") for share in (0.9, 0.99)),
        ),
    ),
    Panel(
        "Store fill",
        AGE,
        "Finished unrolls in the store, over its capacity. A queue that is full means that training is the limit and "
        "actors are slowed. On policy they wait for every update instead, and the store is nearly empty.",
        Unit.share,
        (("seedrl_store_unrolls / seedrl_store_capacity", "fill"),),
        max=1.0,
    ),
    Panel(
        "Unrolls per second",
        AGE,
        "Unrolls made by acting, trained on, and discarded because a session ended.",
        Unit.per_second,
        (
            (rate("unrolls_made_total"), "made"),
            (rate("unrolls_trained_total"), "trained"),
            (total("unrolls_dropped"), "dropped"),
        ),
    ),
    Panel(
        "Reuse",
        AGE,
        "How often an unroll is trained on, on average: unrolls of all gradient steps over unrolls made. A queue has "
        "algorithm.passes, apart from what waits in the store.",
        Unit.number,
        ((f"{rate('unroll_uses_total')} / {rate('unrolls_made_total')}", "uses / made"),),
    ),
    Panel(
        "Held back by the limiter",
        AGE,
        "Share of the time that a side of a replay memory waits for the other: the learner while the memory is filling "
        "(store.min_size) or because acting is behind, actors because training is (store.samples_per_insert). If "
        "actors wait, train less often on each unroll; if the learner does, add actors. A queue has no limiter.",
        Unit.share,
        (("seedrl_store_limited", "{side}"),),
        max=1.0,
    ),
    Panel(
        "Actors",
        ACTORS,
        "Actors that are connected, and the number that the learner could use, from how long it waits for data and how "
        "long actors are held back. A launcher may follow it between actors.count and actors.at_most.",
        Unit.number,
        (("seedrl_sessions_open", "connected"), ("seedrl_desired_actors", "could be used")),
    ),
    Panel(
        "Coming and going",
        ACTORS,
        "Sessions per minute that joined, left (or were lost), were evicted, refused or redirected, or came back.",
        Unit.per_minute,
        (
            (f"60 * {rate('sessions_joined_total')}", "joined"),
            (f"60 * {rate('sessions_left_total')}", "left"),
            (f"60 * {total('sessions_evicted')}", "evicted"),
            (f"60 * {total('sessions_refused')}", "refused"),
            (f"60 * {total('sessions_redirected')}", "redirected"),
            (f"60 * {rate('actors_reconnects_total')}", "came back"),
        ),
    ),
    Panel(
        "Slots",
        ACTORS,
        "Slots leased to actors, and serving.max_slots. At the limit further actors are refused.",
        Unit.number,
        (("seedrl_slots_taken", "taken"), ("seedrl_slots_limit", "limit")),
    ),
    Panel(
        "How actors spend their time",
        ACTORS,
        "Mean share of an actor's time: waiting for environments, and waiting for actions with no environment "
        "stepping. If the latter is large, raise actors.groups, or look for what slows the learner.",
        Unit.share,
        (
            (f"{rate('actors_env_seconds_total')} / seedrl_sessions_open", "environments"),
            (f"{rate('actors_wait_seconds_total')} / seedrl_sessions_open", "waiting for actions"),
        ),
    ),
    Panel(
        "Round trip",
        ACTORS,
        "Time from sending a request to its answer, as actors measure it: the mean, and that of the slowest actor.",
        Unit.seconds,
        ((ROUND_TRIP, "mean"), ("seedrl_actor_slowest_round_trip_seconds", "slowest actor")),
    ),
    Panel(
        "Longest silence",
        ACTORS,
        "Longest time since the last message of a connected actor.",
        Unit.seconds,
        (("seedrl_actor_longest_silence_seconds", "quietest actor"),),
    ),
    Panel(
        "Traffic",
        ACTORS,
        "Observations received, by message or shared memory, and actions sent.",
        Unit.bytes_per_second,
        ((rate("received_bytes_total"), "in: {transport}"), (rate("sent_bytes_total"), "out")),
    ),
    Panel(
        "Rows dropped",
        SAFETY,
        "Rows per second that are not trained on. An actor that leaves loses its unfinished unrolls once; a steady "
        "rate means that actors keep joining and leaving.",
        Unit.per_second,
        ((rate("rows_dropped_total"), "{reason}"),),
        stacked=True,
    ),
    Panel(
        "Skipped updates, failed checkpoints",
        SAFETY,
        "Counts since the run began. An update is skipped when its gradient is not finite: if there are more than a "
        "few, lower algorithm.learning_rate; ten in a row end the learner. If checkpoints could not be written, or "
        "were found damaged, look at the learner's log and at the disk of the run directory.",
        Unit.number,
        (
            ("seedrl_skipped_updates_total", "updates skipped"),
            ("seedrl_checkpoints_failed_total", "checkpoints failed"),
            ("seedrl_checkpoints_damaged_total", "checkpoints damaged"),
        ),
    ),
    Panel(
        "Age of the checkpoint",
        SAFETY,
        "The work that a crash would lose now, and checkpoint.seconds.",
        Unit.seconds,
        (
            ("time() - (seedrl_checkpoint_timestamp_seconds > 0)", "age"),
            ("seedrl_checkpoint_interval_seconds", "interval"),
        ),
    ),
    Panel(
        "Writing checkpoints",
        SAFETY,
        "Mean time to write a checkpoint. The learner does not train meanwhile.",
        Unit.seconds,
        (("seedrl_checkpoint_seconds_sum / seedrl_checkpoint_seconds_count", "mean"),),
    ),
    Panel(
        "Memory",
        SAFETY,
        "Memory of the learner process, and of the store on the device. Both should be flat after the first minutes.",
        Unit.bytes,
        (("process_resident_memory_bytes", "process"), ("seedrl_store_bytes", "store")),
    ),
    Panel(
        "Uptime",
        SAFETY,
        "Time since the learner process started. A fall to zero is a restart.",
        Unit.seconds,
        (("time() - process_start_time_seconds", "uptime"),),
    ),
)
