"""The status of a learner and of its actors. Plain values; knows nothing of how they travel or are shown."""

from dataclasses import dataclass, field
from enum import StrEnum

SILENT_SECONDS = 5.0  # after which an actor is pointed out
DRAINED = "Drained, as was asked"  # the reason that an actor gives if it must not be started again


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit of the speed, the evidence for it, and the one setting to change."""

    bottleneck: str = "none"  # env, network, batching, inference, store, learner, paused; none: nothing to judge yet
    evidence: str = ""
    change: str = ""


class Mood(StrEnum):
    """The tone of a verdict."""

    good = "good"
    open = "open"  # neither good nor bad, or not known
    bad = "bad"


@dataclass(frozen=True, slots=True)
class Learning:
    """The verdict on learning: whether the run learns, the evidence for it, and the one setting to try."""

    verdict: str = "early"  # rising, reached, settled, flat, falling; or a bad sign, such as "entropy gone"
    evidence: str = ""
    change: str = ""  # empty if there is nothing to change
    mood: Mood = Mood.open


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One session. The fields are explained in proto/seedrl/v1/inference.proto."""

    name: str
    session: int
    peer: str
    transport: str  # memory or message
    envs: int
    steps: int
    steps_per_second: float
    round_trip_seconds: float
    wait_fraction: float
    policy_lag: int
    reconnects: int
    connected_seconds: float
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    state: str  # waiting, running or draining
    version: str
    env: str
    device: str
    run_dir: str
    address: str  # where actors find the learner
    metrics_address: str
    goal_env_steps: int
    goal_return: float | None = None
    row: dict[str, float] = field(default_factory=dict)  # the newest row, named as in metrics.jsonl; numbers only
    verdict: Verdict = field(default_factory=Verdict)
    learning: Learning = field(default_factory=Learning)
    trouble: dict[str, int] = field(default_factory=dict)  # everything that was dropped, skipped or refused
    actors: list[ActorStatus] = field(default_factory=list)  # slowest first
    rank: int = 0
    ranks: int = 1  # that train together
    node: str = ""  # the machine
    algorithm: str = ""  # in a few words; empty if nothing is trained
