"""The results of a chaos run or a soak, as JSON and as a page of Markdown. Judges figures; measures none."""

import json
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.disturb import Disturbance
from tests.chaos.faults import Kind
from tests.chaos.ledger import Ledger

FAILOVER_SECONDS = 5.0  # promised: from the port to the last actor
DROP = 0.05  # promised: of updates/s under churn

Report = dict[str, Any]


class Stretch(NamedTuple):
    """Some seconds of training."""

    updates_per_second: float
    wait_fraction: float  # of the learner, for unrolls


def chaos_report(
    settings: Any,
    disturbance: Disturbance,
    rates: dict[str, list[Stretch]],
    ledger: Ledger,
    checkpoint: dict[str, Any],
    broken: dict[str, list[str]],
    updates_after: float,
) -> Report:
    serving, learning = checkpoint.get("serving", {}), checkpoint.get("learning", {})
    return {
        "settings": asdict(settings),
        "load": [round(load, 1) for load in os.getloadavg()],
        "faults": dict(Counter(fault.kind.name for fault in disturbance.injected)),
        "recoveries": recoveries(disturbance),
        "failovers": [
            {"down_seconds": round(each.down_seconds, 2), "stream_seconds": _rounded(each.stream_seconds)}
            for each in disturbance.failovers
        ],
        "stretches": {name: [stretch._asdict() for stretch in each] for name, each in rates.items()},
        "drop_under_churn": _rounded(drop(rates), 4),
        "updates_after_the_last_fault": updates_after,
        "steps_lost_by_kills_of_the_learner": ledger.lost_steps,
        "totals": {
            name: total
            for name, total in {**serving, **learning}.items()
            if name in ("env_steps", "episodes", "updates", "unrolls_trained", "sessions_joined", "sessions_left")
        },
        "rows_dropped": serving.get("rows_dropped", {}),
        "sessions_evicted": {reason: n for reason, n in serving.get("sessions_evicted", {}).items() if n},
        "broken": {promise: words for promise, words in broken.items() if words},
    }


def recoveries(disturbance: Disturbance) -> dict[str, dict[str, float]]:
    """Seconds from a fault, or from its end if it lasts, to the next answer, by kind."""
    result = {}
    for kind in Kind:
        seconds = [each.seconds for each in disturbance.recoveries if each.kind is kind and each.seconds is not None]
        if seconds:
            result[kind.name] = {"count": len(seconds), **spread(seconds)}
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}


def drop(rates: dict[str, list[Stretch]]) -> float | None:
    """The share of updates/s that churn costs; None if it was not measured."""
    if not rates:
        return None
    means = {name: statistics.mean(stretch.updates_per_second for stretch in each) for name, each in rates.items()}
    return 1 - means["churn"] / means["undisturbed"]


def markdown(report: Report) -> str:
    settings = report["settings"]
    lines = [
        f"# Chaos run of {settings['seconds']:g} s, seed {settings['seed']}",
        "",
        f"{settings['actors']} actors, load of the machine at the end {report['load'][0]}. "
        f"Violations: {sum(len(words) for words in report['broken'].values())}.",
        "",
        *table(("fault", "times", "recovered", "median s", "worst s"), _fault_rows(report)),
        "",
        "Seconds until the actor gets answers again, from the fault or from its end if it lasts. An actor that meets "
        "another fault before counts with that one.",
        "",
        *table(("figure", "measured", "promised"), _figures(report)),
        "",
        *table(("total", ""), [(name, f"{value:,}") for name, value in report["totals"].items()]),
        "",
    ]
    lines += [f"BROKEN {promise}: {each[:500]}" for promise, words in report["broken"].items() for each in words[:5]]
    return "\n".join(lines)


def write(report: Report, out: Path, name: str, page: str = "") -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / f"{name}.md").write_text((page or markdown(report)) + "\n")


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def _fault_rows(report: Report) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = []
    for name, times in report["faults"].items():
        seen = report["recoveries"].get(name, {"count": 0, "median": "–", "worst": "–"})
        rows.append((Kind[name].value, times, seen["count"], seen["median"], seen["worst"]))
    return rows


def _figures(report: Report) -> list[Sequence[Any]]:
    streamed = [each["stream_seconds"] for each in report["failovers"] if each["stream_seconds"] is not None]
    loss = report["drop_under_churn"]
    rows: list[Sequence[Any]] = [
        ("learner failovers: port open → all actors stream", _seconds(streamed), f"≤ {FAILOVER_SECONDS:g} s"),
        ("learner failovers: kill → port open", _seconds([each["down_seconds"] for each in report["failovers"]]), "–"),
        ("updates in the 3 s after the last fault", f"{report['updates_after_the_last_fault']:.0f}", "> 0"),
        ("steps lost by kills of the learner, at least", f"{report['steps_lost_by_kills_of_the_learner']:,.0f}", "–"),
        ("rows dropped", ", ".join(f"{n:,} {reason}" for reason, n in report["rows_dropped"].items()), "counted"),
    ]
    if loss is not None:
        for name, stretches in report["stretches"].items():
            each = ", ".join(f"{one['updates_per_second']:.1f} ({one['wait_fraction']:.1%})" for one in stretches)
            rows.append((f"updates/s {name} (learner waits)", each, "–"))
        rows.append(("drop of updates/s under churn", f"{loss:.1%}", f"< {DROP:.0%}"))
    return rows


def _seconds(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f} s" for value in values) or "–"


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)
