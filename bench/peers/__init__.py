"""Alternatives to seedrl do the same job, each in its own venv, in turns with seedrl on the same machine.

A turn is a program that starts, warms up and is measured for five times `seconds`, at least 10 s; each side has a fifth
of `repeats` turns. So the defaults take about four minutes once the venvs exist, and `seconds=6 repeats=15` is for
publishing.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Ratio, Report, Turn, interleave, per_cpu
from bench.peers.meter import end_descendants
from bench.peers.venvs import PeerFailed, last_words, prepare
from seedrl.config import BenchConfig

HERE = Path(__file__).parent
LIMIT = 180.0  # seconds for starting, warming up and being late
OURS = "seedrl_run"


@dataclass(frozen=True, slots=True)
class Side:
    """An adapter and what it is asked to do."""

    adapter: str
    env: str
    target: float = 0.0  # mean return of 100 episodes to reach; 0 for none
    patience: float = 120.0  # seconds after which it counts as not reached


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of an adapter about one turn."""

    turn: Turn
    seconds_to_target: float | None = None
    steps_to_target: float | None = None


on_cartpole = partial(Side, env="cartpole", target=475.0)
on_lunarlander = partial(Side, env="lunarlander", target=200.0, patience=900.0)
SIDES = (
    Side(OURS, "pong"),
    Side("cleanrl_ppo", "pong"),
    Side("sample_factory_appo", "pong"),
    Side("rllib_impala", "pong"),
    on_cartpole(OURS),
    on_cartpole("sb3_ppo"),
    Side("sample_factory_appo", "cartpole"),
    on_lunarlander(OURS),
    on_lunarlander("sb3_ppo"),
    Side(OURS, "inference"),
    Side("torchrl_server", "inference"),
)
# Tried once by hand; an adapter would be in vain.
LEFT_OUT = {
    "moolib": "version 0.0.9b has no wheel, and its CMake build finds no torch, with and without build isolation",
    "TorchBeast": "it has no release on PyPI",
}
Found = Mapping[Side, Sequence[Outcome]]


def run(config: BenchConfig) -> Report:
    report = Report("peers")
    seconds, repeats = max(10.0, 5 * config.seconds), max(1, config.repeats // 5)
    report.note(f"{repeats} turn(s) of {seconds:g} s for each side")
    found = compare(report, repeats, prepare, lambda python, side, seed: measure(python, side, seconds, seed))
    for name, reason in LEFT_OUT.items():
        report.note(f"skipped {name}: {reason}")
    conclude(report, found)
    return report


def compare(
    report: Report,
    repeats: int,
    prepare: Callable[[Path], Path],
    measure: Callable[[Path, Side, int], Outcome],
) -> Found:
    """Every side that can be installed, in turns; one that fails is noted and has no further turn."""
    pythons = {OURS: Path(sys.executable)}
    for adapter in dict.fromkeys(side.adapter for side in SIDES if side.adapter != OURS):
        try:
            pythons[adapter] = prepare(HERE / f"{adapter}.py")
        except PeerFailed as failure:
            report.note(f"skipped {adapter}: {failure}")
    found: dict[Side, list[Outcome]] = {side: [] for side in SIDES if side.adapter in pythons}
    failed: set[Side] = set()
    seeds = {side: itertools.count(1) for side in found}

    def turn(side: Side) -> None:
        if side in failed:
            return
        try:
            found[side].append(measure(pythons[side.adapter], side, next(seeds[side])))
        except PeerFailed as failure:
            failed.add(side)
            report.note(f"skipped {side.adapter} on {side.env}: {failure}")

    interleave({f"{side.adapter} {side.env}": partial(turn, side) for side in found}, repeats)
    return {side: outcomes for side, outcomes in found.items() if side not in failed}


def measure(python: Path, side: Side, seconds: float, seed: int) -> Outcome:
    """Runs an adapter in a directory of its own, and ends whatever it leaves behind."""
    program = ["-m", f"{__name__}.{OURS}"] if side.adapter == OURS else [str(HERE / f"{side.adapter}.py")]
    asked = [f"--env={side.env}", f"--seconds={seconds}", f"--seed={seed}"]
    asked += [f"--target={side.target}", f"--patience={side.patience}"]
    limit = LIMIT + 3 * seconds + (side.patience if side.target else 0)
    print(f"  {side.adapter} on {side.env} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        environment = {**os.environ, "TMPDIR": directory, **_path_of(side)}
        with out.open("w") as to_out, err.open("w") as to_err:
            process = subprocess.Popen(
                [str(python), *program, *asked], cwd=directory, env=environment, stdout=to_out, stderr=to_err
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired as late:
                raise PeerFailed(f"it had no result after {limit:.0f} s") from late
            finally:
                end_descendants(process.pid)
                process.kill()
                process.wait()
        if code:
            raise PeerFailed(f"it ended with exit code {code}: {last_words(err.read_text(errors='replace'))}")
        return parse(out.read_text(errors="replace"))


def _path_of(side: Side) -> dict[str, str]:
    """Ours imports the code that is running now; a peer imports nothing of it."""
    return {"PYTHONPATH": str(HERE.parents[1]) if side.adapter == OURS else ""}


def parse(output: str) -> Outcome:
    """The JSON in the last line of an adapter's output."""
    line = (output.strip().splitlines() or [""])[-1]
    try:
        told = json.loads(line)
        turn = Turn(told["steps"], told["wall"], told["cpu"])
    except (ValueError, KeyError, TypeError) as error:
        raise PeerFailed(f"its last line is no result: {line[:100]!r}") from error
    return Outcome(turn, told.get("seconds_to_target"), told.get("steps_to_target"))


def conclude(report: Report, found: Found) -> None:
    """The table and the ratios."""
    for side, outcomes in found.items():
        report.add(_row(side, outcomes))
    pong, cartpole = Side(OURS, "pong"), on_cartpole(OURS)
    for name, bound, value in (("over_best_peer", 1.5, rate), ("over_best_peer_per_cpu", 1.3, rate_per_cpu)):
        _add_ratio(report, name, found, pong, _best(found, "pong", value), value, bound, at_most=False)
    factory, sb3 = Side("sample_factory_appo", "cartpole"), on_cartpole("sb3_ppo")
    _add_ratio(report, "cartpole_over_sample_factory", found, cartpole, factory, rate, 3.0, at_most=False)
    _add_ratio(report, "cartpole_seconds_over_sb3", found, cartpole, sb3, seconds_to_target, 1.0, at_most=True)
    ours, sb3 = on_lunarlander(OURS), on_lunarlander("sb3_ppo")
    _add_ratio(report, "lunarlander_seconds_over_sb3", found, ours, sb3, seconds_to_target, 1.0, at_most=True)


def rate(outcome: Outcome) -> float | None:
    return outcome.turn.rate


def rate_per_cpu(outcome: Outcome) -> float | None:
    return per_cpu(outcome.turn)


def seconds_to_target(outcome: Outcome) -> float | None:
    return outcome.seconds_to_target


Value = Callable[[Outcome], float | None]


def _best(found: Found, env: str, value: Value) -> Side | None:
    """The peer with the highest value."""
    peers = [side for side in found if side.env == env and side.adapter != OURS]
    return max(peers, key=lambda side: _median(found[side], value) or 0.0, default=None)


def _add_ratio(
    report: Report, name: str, found: Found, ours: Side, peer: Side | None, value: Value, bound: float, *, at_most: bool
) -> None:
    """Ours by the peer's, turn by turn; without both there is none, and that is said."""
    both = zip(found.get(ours, ()), found.get(peer, ()) if peer else (), strict=False)
    pairs = [(value(above), value(below)) for above, below in both]
    values = [above / below for above, below in pairs if above and below]
    if values:
        report.add_ratio(Ratio(name, values, bound, at_most))
    else:
        report.note(f"no {name}: it takes a result of ours and of a peer")


def _median(outcomes: Sequence[Outcome], value: Value) -> float | None:
    known = [each for each in map(value, outcomes) if each is not None]
    return statistics.median(known) if known else None


def _row(side: Side, outcomes: Sequence[Outcome]) -> dict[str, object]:
    row: dict[str, object] = {
        "side": side.adapter,
        "env": side.env,
        "steps per second": _median(outcomes, rate),
        "steps per CPU-second": _median(outcomes, rate_per_cpu),
    }
    if side.target:
        row["score"] = side.target
        row["seconds to it"] = _median(outcomes, seconds_to_target)
        row["steps to it"] = _median(outcomes, lambda outcome: outcome.steps_to_target)
    return row
