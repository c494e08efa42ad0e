"""C8: clock jumps change nothing, because whatever waits or measures goes by a clock that cannot be set."""

import ast
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos.cluster import ROOT, Cluster, Setup, wait_until

JUMPS = (3600, -7200, 0)  # seconds from the true time
STRETCH_SECONDS = 5.0

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
# Who may ask for the time of day: to tell it to people, or because what it makes is valid until a certain day.
TELLS_THE_TIME = {
    "seedrl/wire/certificates.py",
    "seedrl/run/context.py",
    "seedrl/launching/torchrun.py",
    "seedrl/run/membership.py",
    "seedrl/monitoring/members.py",
    "seedrl/monitoring/overview.py",
    "seedrl/monitoring/sinks.py",
    "seedrl/run/saving.py",
}


def asks_for_the_time_of_day(path: Path) -> bool:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) in WALL_CLOCK for call in calls)


def test_source_asks_for_the_time_of_day_only_to_tell_it() -> None:
    files = [path for package in ("seedrl", "envs_server") for path in (ROOT / package).rglob("*.py")]
    asking = {str(path.relative_to(ROOT)) for path in files if asks_for_the_time_of_day(path)}
    assert asking <= TELLS_THE_TIME, "use time.monotonic to wait, to measure and to decide"


@pytest.fixture
def jumping_clock(tmp_path: Path) -> dict[str, str]:
    """Environment variables that let the file `offset` set the clock of a process."""
    library = tmp_path / "jumping_clock.so"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = str(Path(__file__).with_name("jumping_clock.c"))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    jump(tmp_path, 0)
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(tmp_path / "offset")}


def jump(directory: Path, seconds: int) -> None:
    """Sets the clock to so many seconds from the true time."""
    with (directory / "offset").open("r+b" if (directory / "offset").exists() else "wb") as file:
        file.write(f"{seconds:<16}".encode())


@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_clock_jumps_of_hours_end_no_session_and_slow_nothing_down(
    tmp_path: Path, jumping_clock: dict[str, str]
) -> None:
    with Cluster(tmp_path, Setup(actors=2), **jumping_clock) as cluster:
        wait_until(cluster.all_stream, "all actors stream")
        before = updates_in_a_stretch(cluster)
        after = {}
        for seconds in JUMPS:
            jump(tmp_path, seconds)
            after[seconds] = updates_in_a_stretch(cluster)
        print(f"updates in {STRETCH_SECONDS:g} s: {before:.0f} before, by offset of the clock {after}")
        assert min(after.values()) > 0.5 * before, after
        numbers = cluster.learner_numbers()
        assert numbers["seedrl_sessions_joined_total"] == 2
        assert numbers["seedrl_sessions_left_total"] == 0
        assert cluster.stop() == []
        assert cluster.violations() == []
    rows = [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["time"] for row in rows) - min(row["time"] for row in rows) > 3 * 3600 - 60, "the clock did jump"
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert rows[-1]["seconds"] < 120


def updates_in_a_stretch(cluster: Cluster) -> float:
    before = cluster.updates()
    time.sleep(STRETCH_SECONDS)
    return cluster.updates() - before
