"""Names the bottleneck of a run from a row of measurements. Pure; knows nothing of how the row was measured.

A learner that hardly ever waits is the limit itself, which is the best case. If it waits, the cycle of the environments
is too slow, and the part that takes the largest share of that cycle is the bottleneck.
"""

from seedrl.config import LearnerConfig
from seedrl.monitoring.sampler import CYCLE, Row
from seedrl.sizes import available_cores, store_tolerance, torch_threads
from seedrl.status import Verdict

BUSY_ENOUGH = 0.1  # a learner that waits less than this share of its time is the limit


def diagnose(row: Row, config: LearnerConfig, is_on_policy: bool = False) -> Verdict:
    """Return the verdict on a row that covers a few seconds. On policy, actors wait for every update."""
    if config.source:
        return _recorded(row, config)
    if not row["actors"]:
        return Verdict("none", "No actor is connected.", "Start one: seedrl actor learner=HOST:PORT.")
    if row["paused_actors"]:
        return _paused(row)
    if not row["updates"] and row.get("limit/filling"):
        return _filling(config)
    if not row["updates"]:
        return Verdict("none", "There has been no update yet.", "Wait a moment.")
    wait = row["learner_wait_fraction"]
    if wait < BUSY_ENOUGH:
        return _learner(row, config)
    if is_on_policy and row["cycle/hold"] >= max(row[f"cycle/{part}"] for part in CYCLE):
        return _in_turns(row, config)
    part = max(CYCLE, key=lambda name: row[f"cycle/{name}"])
    share = row[f"cycle/{part}"]
    judge = {"env": _env, "network": _network, "hold": _store, "fill": _batching, "inference": _inference}[part]
    verdict = judge(row, config, f"{share:.0%} of a group's cycle")
    waits = f"The learner waits {wait:.0%} of its time{_by_ratio(row, config)}; "
    return Verdict(verdict.bottleneck, waits + verdict.evidence, verdict.change + _or_train_more(row, config))


def _recorded(row: Row, config: LearnerConfig) -> Verdict:
    wait = row["learner_wait_fraction"]
    evidence = f"The learner trains on recorded unrolls and reads them for {wait:.0%} of its time; it needs no actors."
    return Verdict("learner", evidence, _more_compute(config))


def _filling(config: LearnerConfig) -> Verdict:
    return Verdict(
        "none",
        f"Training begins when the store has {max(config.store.min_size, config.algorithm.batch_size):,} unrolls.",
        "Wait, or lower store.min_size.",
    )


def _by_ratio(row: Row, config: LearnerConfig) -> str:
    """Return which limit holds the learner back, if a limiter does."""
    ratio = config.store.samples_per_insert
    return f", held back by store.samples_per_insert={ratio:g}" if row.get("limit/learner") else ""


def _or_train_more(row: Row, config: LearnerConfig) -> str:
    """Return what else would keep the learner busy, if a limiter holds it back."""
    return " Or raise store.samples_per_insert, to train more often on each unroll." if _by_ratio(row, config) else ""


def _paused(row: Row) -> Verdict:
    paused, actors = row["paused_actors"], row["actors"]
    which = "All actors are" if paused == actors else f"{paused} of {actors} actors {'is' if paused == 1 else 'are'}"
    return Verdict("paused", f"{which} paused, by seedrl control pause.", "Let them continue: seedrl control resume.")


def _in_turns(row: Row, config: LearnerConfig) -> Verdict:
    return Verdict(
        "learner",
        f"Acting and training take turns, because the run is on policy: the learner trains "
        f"{1 - row['learner_wait_fraction']:.0%} of the time, and actors wait for it meanwhile.",
        _more_compute(config),
    )


def _learner(row: Row, config: LearnerConfig) -> Verdict:
    stages = {name.removeprefix("learner/"): share for name, share in row.items() if name.startswith("learner/")}
    longest = max(stages, key=lambda name: stages[name])
    held = row["cycle/hold"]
    limited = row.get("limit/actors", 0.0) > 0
    cause = f" by store.samples_per_insert={config.store.samples_per_insert:g}" if limited else ""
    slowed = f", and actors are held back {held:.0%} of their cycle{cause}" if held > 0.05 else ""
    where = f"{1 - row['learner_wait_fraction']:.0%} of its time, most of it in {longest} ({stages[longest]:.0%})"
    if not stages[longest]:
        where = "all the time, and an update takes longer than this sample covers"
    less = "Lower store.samples_per_insert, to train less often on each unroll. Or: " if slowed and limited else ""
    evidence = f"The learner trains {where}{slowed}. More actors would not help."
    return Verdict("learner", evidence, less + _more_compute(config))


def _env(row: Row, config: LearnerConfig, share: str) -> Verdict:
    return Verdict(
        "env",
        f"stepping the environments takes {share}.",
        f"Raise actors.count (now {config.actors.count}), or start actors on other machines.",
    )


def _network(row: Row, config: LearnerConfig, share: str) -> Verdict:
    trip, served = 1e3 * row["round_trip_seconds"], 1e3 * row["act_latency_seconds"]
    return Verdict(
        "network",
        f"the network takes {share}: a round trip is {trip:.1f} ms, of which the learner needs {served:.1f} ms.",
        f"Raise actors.groups (now {config.actors.groups}), so that more requests are under way at once.",
    )


def _batching(row: Row, config: LearnerConfig, share: str) -> Verdict:
    serving = config.serving
    return Verdict(
        "batching",
        f"requests wait for more rows for {share}: batches have {row['inference_batch']:.0f} rows on average and "
        f"serving.min_rows={serving.min_rows}.",
        f"Lower serving.min_rows, or serving.max_wait (now {serving.max_wait:g} s).",
    )


def _inference(row: Row, config: LearnerConfig, share: str) -> Verdict:
    return Verdict(
        "inference",
        f"inference takes {share}, and the server thread spends {row['serving/forward']:.0%} of its time in forward "
        f"passes of {row['inference_batch']:.0f} rows.",
        _more_compute(config),
    )


def _store(row: Row, config: LearnerConfig, share: str) -> Verdict:
    slots = row["actors"] * config.actors.envs
    if config.lockstep:
        return Verdict("store", "serving waits for every update: this is a lock-step run.", "Set lockstep=false.")
    if row.get("limit/actors"):
        return Verdict(
            "store",
            f"yet actors are held back for {share}: acting and training wait for each other in turns, because neither "
            "may be far ahead.",
            f"Raise store.tolerance (now {store_tolerance(config):g}).",
        )
    return Verdict(
        "store",
        f"yet the store is full for {share}: many unrolls end at once, and it holds too few of them.",
        f"Raise store.capacity to {slots}, one unroll for each environment.",
    )


def _more_compute(config: LearnerConfig) -> str:
    cores, threads = available_cores(), torch_threads(config)
    if threads < cores // 2:
        return f"Raise threads (now {threads} of {cores} cores)."
    return "Set device=cuda if there is a GPU; otherwise choose a smaller network with model.name."
