"""Sweeps: which runs there are, where they run, what is kept of them. The runs are small programs that end at once."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from seedrl.commandline import sweep as sweeping
from seedrl.commandline.checking import checked
from seedrl.commandline.main import main, vocabulary
from seedrl.commandline.members import Member, Status, read_table, table, write_table
from seedrl.commandline.search import Grid, Search, check_values, split
from seedrl.commandline.sweep import PLOT, Sweep, places
from seedrl.config import SweepConfig
from seedrl.errors import ConfigError
from seedrl.launching.children import Process

RUN = vocabulary("run")


def grid(*overrides: str) -> tuple[list[str], Grid]:
    fixed, varied = split(checked(RUN, overrides, is_sweep=True))
    return fixed, Grid(varied, RUN)


def asked(search: Search) -> Iterator[list[str]]:
    while (found := search.ask()) is not None:
        yield found[1]


def test_grid_is_every_combination_of_the_values() -> None:
    fixed, search = grid("env=pong", "seed=1,2", "algorithm.learning_rate=1e-3,1e-4")
    assert fixed == ["env=pong"]
    assert search.count == 4
    assert list(asked(search)) == [
        [f"seed={seed}", f"algorithm.learning_rate={rate}"] for seed in (1, 2) for rate in ("0.001", "0.0001")
    ]


def test_grid_takes_ranges_choices_and_globs() -> None:
    assert list(asked(grid("seed=range(1,4)")[1])) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert list(asked(grid("model.layers=choice([64],[64,64])")[1])) == [
        ["model.layers=[64]"],
        ["model.layers=[64,64]"],
    ]
    assert list(asked(grid("env=glob(cart*)")[1])) == [["env=cartpole"]]


@pytest.mark.parametrize(
    ("trials", "overrides", "words"),
    [
        (0, ["algorithm.learning_rate=interval(1e-4,1e-2)"], "has no end of values: give sweep.trials=N"),
        (5, ["seed=1"], "sweep.trials=5 needs a setting to choose values for"),
        (-1, [], "sweep.trials=-1 must not be negative"),
    ],
)
def test_sweep_without_values_or_without_end_is_refused(trials: int, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_values(trials, split(overrides)[1])


def test_places_are_equal_shares_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7, 9})
    assert places(SweepConfig()) == [{1, 3, 5, 7, 9}]
    assert places(SweepConfig(parallel=2)) == [{1, 3}, {5, 7}]
    assert places(SweepConfig(parallel=2, cores=2)) == [{1}, {3}]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SweepConfig(parallel=0), "sweep.parallel=0 must be at least 1"),
        (SweepConfig(cores=3), "sweep.cores=3 is more than the 2"),
        (SweepConfig(parallel=3), "sweep.parallel=3 runs need as many cores, and there are 2"),
    ],
)
def test_places_that_do_not_fit_the_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: SweepConfig, words: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError, match=words):
        places(config)


def test_table_survives_its_file(tmp_path: Path) -> None:
    members = [
        Member(0, ["seed=1", "model.layers=[64,64]"], tmp_path / "0", Status.DONE, 1000, 12.5, 12.0),
        Member(1, ["env.id='a b'"], tmp_path / "1", Status.FAILED, 0, None, None, 'it, and "that"'),
    ]
    write_table(tmp_path, members)
    assert list(read_table(tmp_path).values()) == members


def test_table_names_runs_with_their_ends(tmp_path: Path) -> None:
    members = [
        Member(0, ["seed=1"], tmp_path / "0", Status.DONE, 1000, 12.5),
        Member(1, ["seed=2"], tmp_path / "1", Status.FAILED, reason="no reason"),
    ]
    header, first, second, why = table(members).splitlines()
    assert header.split() == ["run", "status", "steps", "best", "return", "settings", "directory"]
    assert first.split() == ["0", "done", "1,000", "12.50", "seed=1", str(tmp_path / "0")]
    assert second.split() == ["1", "failed", "0", "–", "seed=2", str(tmp_path / "1")]
    assert why == "run 1 failed: no reason"


# The runs themselves.

PROGRAM = """
import json, os, pathlib, sys
settings = dict(word.split("=", 1) for word in sys.argv[2:])
seed = int(settings["seed"])
directory = pathlib.Path(settings["run_dir"].strip("'"))
print("cores", sorted(os.sched_getaffinity(0)))
if seed == 13:
    sys.exit("unlucky")
directory.mkdir(exist_ok=True)
(directory / "config.yaml").write_text(f"seed: {seed}\\nenv: {{id: Fake-v1}}\\n")
rows = [dict(env_steps=10 * i, seconds=i, return_mean_100=value) for i, value in enumerate([1, seed, 0], 1)]
(directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
status = "interrupted" if seed == 11 else "done"
(directory / "summary.json").write_text(json.dumps(dict(env_steps=30, status=status)))
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The command lines of the runs that were started, each of them a small program."""
    (tmp_path / "fake_run.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: list[Sequence[str]] = []
    original: Callable[..., Process] = sweeping.start_module

    def start(_: str, *words: str, **options: object) -> Process:
        found.append(words)
        return original("fake_run", *words, **options)

    monkeypatch.setattr(sweeping, "start_module", start)
    return found


def run_sweep(directory: Path, *overrides: str, at_once: int = 1) -> int:
    fixed, search = grid(*overrides)
    cores = sorted(os.sched_getaffinity(0))
    directory.mkdir(exist_ok=True)
    shares = [{cores[place % len(cores)]} for place in range(at_once)]
    return Sweep(directory, shares, fixed, search, check=refuse_seed_0).run()


def refuse_seed_0(words: Sequence[str]) -> None:
    if "seed=0" in words:
        raise ConfigError("seed=0 is refused")


def test_sweep_continues_after_runs_that_fail_and_its_code_tells(tmp_path: Path, started: list[Sequence[str]]) -> None:
    directory = tmp_path / "sweep"
    assert run_sweep(directory, "seed=0,13,2,5", "display=none", at_once=2) == 1
    members = read_table(directory)
    assert [member.status for member in members.values()] == ["failed", "failed", "done", "done"]
    assert [member.best_return for member in members.values()] == [None, None, 2.0, 5.0]
    assert [member.newest_return for member in members.values()] == [None, None, 0.0, 0.0]
    assert [member.env_steps for member in members.values()] == [0, 0, 30, 30]
    assert members[0].reason == "seed=0 is refused"
    assert members[1].reason == "unlucky (code 1)"
    assert len(started) == 3
    assert all("display=none" in words for words in started)


def test_sweep_of_runs_that_succeed_has_code_0_and_a_plot(
    tmp_path: Path, started: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(tmp_path / "sweep", "seed=2,5") == 0
    assert (tmp_path / "sweep" / PLOT).stat().st_size > 1000
    assert capsys.readouterr().out.count("done: best return") == 2


def test_sweep_gives_each_run_its_cores(tmp_path: Path, started: list[Sequence[str]]) -> None:
    before = os.sched_getaffinity(0)
    run_sweep(tmp_path / "sweep", "seed=2")
    assert (tmp_path / "sweep/0.log").read_text().strip() == f"cores [{min(before)}]"
    assert os.sched_getaffinity(0) == before


def test_sweep_that_is_continued_repeats_only_what_is_not_done(tmp_path: Path, started: list[Sequence[str]]) -> None:
    directory = tmp_path / "sweep"
    run_sweep(directory, "seed=2,13")
    started.clear()
    assert run_sweep(directory, "seed=2,13,5") == 1
    assert [word for words in started for word in words if word.startswith("seed")] == ["seed=13", "seed=5"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=5,7", "display=none"], "its run 0 has seed=2, not seed=5"),
        (["seed=2,7", "display=live"], "holds a sweep with display=none; give the same, or another"),
    ],
)
def test_sweep_directory_with_other_values_is_refused(
    tmp_path: Path, started: list[Sequence[str]], overrides: list[str], words: str
) -> None:
    run_sweep(tmp_path / "sweep", "seed=2,7", "display=none")
    with pytest.raises(ConfigError, match=words):
        run_sweep(tmp_path / "sweep", *overrides)


def test_sweep_repeats_a_run_that_stopped_cleanly_before_its_end(tmp_path: Path, started: list[Sequence[str]]) -> None:
    """A run that gets a signal saves, and ends with code 0."""
    for _ in range(2):
        assert run_sweep(tmp_path / "sweep", "seed=2,11") == 0
    assert [member.status for member in read_table(tmp_path / "sweep").values()] == [Status.DONE, Status.INTERRUPTED]
    assert [next(word for word in words if word.startswith("seed")) for words in started] == [
        "seed=2",
        *["seed=11"] * 2,
    ]


def test_sweep_that_is_interrupted_starts_no_further_run(
    tmp_path: Path, started: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sweeping.start_module

    def start(*words: str, **options: object) -> Process:
        process = original(*words, **options)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(sweeping, "start_module", start)
    handler = signal.getsignal(signal.SIGINT)
    assert run_sweep(tmp_path / "sweep", "seed=2,5,7") == 128 + signal.SIGINT
    assert len(started) == 1
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "-m", "run=a,b"], "only seedrl run has sweeps, not seedrl eval"),
        (["run", "seed=1,2", "-m", "run_dir=x"], "run_dir=x is the directory of one run; that of a sweep is sweep.dir"),
        (["run", "sweep.parallel=2"], "sweep.parallel=2 is for sweeps: give -m as well"),
        (["run", "seed=1,2"], "seed=1,2 has several values, which -m runs one after another"),
    ],
)
def test_line_that_confuses_a_run_and_a_sweep_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err == f"seedrl {arguments[0]}: {words}\n"
