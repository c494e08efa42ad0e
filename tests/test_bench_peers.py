"""Tests of how peers are found, run and compared. No peer is installed and no network is used here."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest

from bench.harness import Report, Turn
from bench.peers import (
    HERE,
    LEFT_OUT,
    OURS,
    SIDES,
    Outcome,
    Side,
    compare,
    conclude,
    measure,
    on_cartpole,
    on_lunarlander,
    parse,
)
from bench.peers.meter import end_descendants, family, tree_cpu
from bench.peers.venvs import PeerFailed, last_words, prepare, requirements

ADAPTERS = sorted({side.adapter for side in SIDES} - {OURS})
LINE = {"steps": 4096, "wall": 2.0, "cpu": 4.0}


def outcome(steps: float, cpu: float = 1.0, seconds: float | None = None) -> Outcome:
    return Outcome(Turn(steps, wall=1.0, cpu=cpu), seconds, None if seconds is None else steps)


def refuse(command: Sequence[str]) -> None:
    raise PeerFailed("it does not install: no network")


# Installing


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "seedrl" / "peers"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_requirements_of_an_adapter_are_pinned_and_have_one_torch(adapter: str) -> None:
    wanted = requirements(HERE / f"{adapter}.py")
    assert all("==" in requirement for requirement in wanted)
    assert "torch==2.13.0" in wanted


def test_requirements_of_envpool_are_the_version_we_run() -> None:
    pins = (HERE.parents[1] / "constraints.txt").read_text().splitlines()
    envpools = {each for name in ADAPTERS for each in requirements(HERE / f"{name}.py") if each.startswith("envpool")}
    assert envpools <= set(pins)


def test_prepare_first_time_makes_a_venv_and_installs_what_is_asked(empty_cache: Path) -> None:
    commands: list[Sequence[str]] = []

    def execute(command: Sequence[str]) -> None:
        commands.append(command)
        (empty_cache / "sb3_ppo").mkdir(parents=True, exist_ok=True)

    adapter = HERE / "sb3_ppo.py"
    assert prepare(adapter, execute) == empty_cache / "sb3_ppo" / "bin" / "python"
    assert [command[2] for command in commands] == ["venv", "pip"]
    assert set(requirements(adapter)) <= set(commands[1])


def test_prepare_again_installs_only_if_something_else_is_asked(empty_cache: Path) -> None:
    adapter = HERE / "sb3_ppo.py"
    note = empty_cache / "sb3_ppo" / "installed.txt"
    note.parent.mkdir(parents=True)
    note.write_text("\n".join(requirements(adapter)) + "\n")
    prepare(adapter, refuse)
    note.write_text("torch==1.0\n")
    with pytest.raises(PeerFailed, match="no network"):
        prepare(adapter, refuse)


def test_last_words_are_the_last_error_or_else_the_last_line() -> None:
    assert last_words("WARNING: an error?\nERROR: No matching distribution\n\n  [notice] newer pip\n").startswith(
        "ERROR"
    )
    assert last_words("one\ntwo\n\n") == "two"
    assert last_words("") == "it said nothing"


def test_compare_without_any_peer_lists_each_as_skipped_and_measures_ours() -> None:
    report = Report("peers")
    found = compare(report, 1, lambda adapter: prepare(adapter, refuse), lambda python, side, seed: outcome(1))
    conclude(report, found)
    skipped = [note for note in report.notes if note.startswith("skipped")]
    assert skipped == [f"skipped {name}: it does not install: no network" for name in _in_order(ADAPTERS)]
    assert {row["side"] for row in report.table} == {OURS}
    assert report.ratios == []
    assert sum(note.startswith("no ") for note in report.notes) == 5


def _in_order(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(side.adapter for side in SIDES) if name in names]


# Running


def test_compare_peer_that_fails_is_noted_once_and_has_no_further_turn() -> None:
    tried: list[tuple[str, int]] = []

    def fail_rllib(python: Path, side: Side, seed: int) -> Outcome:
        tried.append((side.adapter, seed))
        if side.adapter == "rllib_impala":
            raise PeerFailed("it ended")
        return outcome(1)

    report = Report("peers")
    found = compare(report, 3, lambda adapter: adapter, fail_rllib)
    assert [seed for name, seed in tried if name == "cleanrl_ppo"] == [1, 2, 3]
    assert [seed for name, seed in tried if name == "rllib_impala"] == [1]
    assert report.notes == ["skipped rllib_impala on pong: it ended"]
    assert "rllib_impala" not in {side.adapter for side in found}


def test_measure_program_that_fails_gives_its_last_words_as_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"it ended with exit code 2: .*No such file"):
        measure(Path(sys.executable), Side("missing", "pong"), seconds=0.1, seed=1)


def test_measure_gives_the_program_what_it_asks_for_and_reads_its_result(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho noise "$@" >&2\ntest -z "$PYTHONPATH" && echo \'{json.dumps(LINE)}\'\n')
    program.chmod(0o755)
    assert measure(program, Side("cleanrl_ppo", "pong"), seconds=0.1, seed=1) == parse(json.dumps(LINE))


def test_parse_takes_the_last_line_whatever_came_before() -> None:
    told = {**LINE, "seconds_to_target": 17.5, "steps_to_target": 62_000}
    assert parse(f"chatter\n\n{json.dumps(told)}\n") == Outcome(Turn(4096, 2.0, 4.0), 17.5, 62_000)


@pytest.mark.parametrize("output", ["", "Killed\n", '{"steps": 1}\n', "[1]\n", "3\n"])
def test_parse_anything_else_is_the_peers_failure(output: str) -> None:
    with pytest.raises(PeerFailed, match="no result"):
        parse(output)


def test_tree_cpu_counts_children_that_live_and_those_that_ended() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\n"
    before = tree_cpu(os.getpid())
    subprocess.run([sys.executable, "-c", spin], check=True, stdout=subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, "-c", spin + "input()"], stdin=PIPE, stdout=PIPE) as living:
        assert living.stdout is not None
        living.stdout.readline()
        assert tree_cpu(os.getpid()) - before >= 0.55
        living.kill()


def test_end_descendants_ends_children_and_spares_their_parent() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 100 & echo; wait; echo over"], stdout=PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        child, root = family(parent.pid)
        assert root == parent.pid
        end_descendants(parent.pid)
        assert parent.stdout.read() == "over\n"
        assert not Path(f"/proc/{child}").exists()


# Comparing


def test_conclude_ratios_are_over_the_best_peer_of_each_measure() -> None:
    report = Report("peers")
    conclude(
        report,
        {
            Side(OURS, "pong"): [outcome(900, cpu=2.0)],
            Side("cleanrl_ppo", "pong"): [outcome(600, cpu=2.0)],
            Side("rllib_impala", "pong"): [outcome(300, cpu=0.5)],
            on_cartpole(OURS): [outcome(12_000, seconds=10.0)],
            on_cartpole("sb3_ppo"): [outcome(3_000, seconds=20.0)],
            Side("sample_factory_appo", "cartpole"): [outcome(8_000)],
            on_lunarlander(OURS): [outcome(2_000, seconds=90.0)],
            on_lunarlander("sb3_ppo"): [outcome(1_000, seconds=60.0)],
            Side(OURS, "inference"): [outcome(5_000)],
        },
    )
    assert {ratio.name: (ratio.value, ratio.met) for ratio in report.ratios} == {
        "over_best_peer": (1.5, True),
        "over_best_peer_per_cpu": (0.75, False),
        "cartpole_over_sample_factory": (1.5, False),
        "cartpole_seconds_over_sb3": (0.5, True),
        "lunarlander_seconds_over_sb3": (1.5, False),
    }
    assert [row["seconds to it"] for row in report.table if "seconds to it" in row] == [10.0, 20.0, 90.0, 60.0]


def test_conclude_target_never_reached_gives_no_ratio_but_a_note() -> None:
    report = Report("peers")
    found = {on_cartpole(OURS): [outcome(1)], on_cartpole("sb3_ppo"): [outcome(1, seconds=9)]}
    conclude(report, found)
    assert "cartpole_seconds_over_sb3" not in {ratio.name for ratio in report.ratios}
    assert any("cartpole_seconds_over_sb3" in note for note in report.notes)


def test_left_out_peers_all_have_a_reason() -> None:
    assert all(reason for reason in LEFT_OUT.values())
