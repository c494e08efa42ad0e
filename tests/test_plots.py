"""Runs read back, grouped, compared and drawn; the runs are made up."""

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from seedrl.commandline.main import main
from seedrl.config import LearnerConfig, PlotConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.compare import run_plot, table
from seedrl.monitoring.curves import find_runs, grouped, read_curve
from seedrl.monitoring.plots import draw_curve, on_common_grid
from seedrl.run.directory import plain
from tests.integration.processes import Commands

PNG = b"\x89PNG\r\n"
Rows = Sequence[tuple[int, float, float | None]]
RISING: Rows = [(100, 1.0, None), (200, 2.0, 10.0), (300, 3.0, 20.0)]


def leave_run(run_dir: Path, rows: Rows = RISING, torn: str = "", **settings: Any) -> Path:
    """A run directory as a learner leaves it; settings such as seed=2 or model__lstm=64."""
    config = LearnerConfig(run_dir=str(run_dir))
    for name, value in settings.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(config, section) if section else config, key, value)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    lines = [{"env_steps": steps, "seconds": seconds, "return_mean_100": score} for steps, seconds, score in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return run_dir


def labels(*runs: Path) -> list[str]:
    return [group.label for group in grouped([read_curve(run) for run in runs])]


# Reading.


def test_curve_leaves_out_what_came_before_the_first_episode(tmp_path: Path) -> None:
    curve = read_curve(leave_run(tmp_path / "run", seed=7))
    assert (curve.env, curve.seed, curve.score) == ("CartPole-v1", "7", 20.0)
    assert curve.env_steps.tolist() == [200, 300]
    assert curve.seconds.tolist() == [2.0, 3.0]


def test_curve_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    curve = read_curve(leave_run(tmp_path / "run", [*RISING, (350, 3.5, 25.0), (400, 4.0, 30.0)]))
    assert curve.env_steps.tolist() == [200, 300, 350, 400]


def test_curve_of_a_crashed_and_resumed_run_leaves_out_what_was_lost(tmp_path: Path) -> None:
    """The checkpoint was made at 250 steps and 2.5 s; steps and seconds go on from there."""
    lost = [(400, 4.0, 99.0), (500, 5.0, 99.0)]
    curve = read_curve(leave_run(tmp_path / "run", [*RISING[:2], *lost, (450, 3.2, 30.0), (600, 4.5, 40.0)]))
    assert curve.env_steps.tolist() == [200, 450, 600]
    assert curve.seconds.tolist() == [2.0, 3.2, 4.5]


def test_curve_of_a_run_that_began_anew_without_an_episode_yet_is_empty(tmp_path: Path) -> None:
    assert read_curve(leave_run(tmp_path / "run", [*RISING, (50, 0.5, None)])).returns.size == 0


@pytest.mark.parametrize("torn", ['{"env_steps": 400, "sec', "null\n", "[1]\n", '{"env_steps": "x"}\n', "[" * 100_000])
def test_curve_with_a_broken_line_has_the_others(tmp_path: Path, torn: str) -> None:
    assert read_curve(leave_run(tmp_path / "run", torn=torn)).returns.tolist() == [10.0, 20.0]


def test_curve_broken_line_before_a_resume_is_left_out(tmp_path: Path) -> None:
    row = {"env_steps": 500, "seconds": 5.0, "return_mean_100": 50.0}
    run = leave_run(tmp_path / "run", torn='{"env_steps": 4{"env_steps": 450}\n' + json.dumps(row) + "\n")
    assert read_curve(run).env_steps.tolist() == [200, 300, 500]


def test_curve_numbers_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    wild = [(400, 4.0, float("nan")), (500, 5.0, float("inf")), (600, 6.0, 10.0**200), (10**400, 7.0, 1.0)]
    assert read_curve(leave_run(tmp_path / "run", [*RISING, *wild])).returns.tolist() == [10.0, 20.0]


# Finding.


def test_find_runs_below_a_directory_finds_each(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / name) for name in ("a", "deep/er/b", "deep/c")]
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-metrics").mkdir()
    (tmp_path / "no-metrics" / "config.yaml").touch()
    assert find_runs(str(tmp_path)) == sorted(runs)


def test_find_runs_run_directory_is_itself(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run")
    leave_run(run / "checkpoints" / "inside")
    assert find_runs(str(run)) == [run]


def test_find_runs_file_among_what_a_glob_gives_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "multirun.yaml").touch()
    assert find_runs(str(tmp_path / "multirun.yaml")) == []


# Grouping.


def test_groups_seeds_and_machines_do_not_set_runs_apart(tmp_path: Path) -> None:
    first = leave_run(tmp_path / "a", seed=1)
    second = leave_run(tmp_path / "b", seed=2, listen="unix:x", threads=3, actors__threads=2, checkpoint__keep=9)
    assert labels(first, second) == ["CartPole-v1 (2 seeds)"]


def test_groups_one_seed_run_twice_is_two_runs(tmp_path: Path) -> None:
    assert labels(leave_run(tmp_path / "a"), leave_run(tmp_path / "b")) == ["CartPole-v1 (2 runs)"]


def test_groups_are_labelled_by_what_differs_and_nothing_else(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / f"{lstm}-{seed}", model__lstm=lstm, seed=seed) for lstm in (0, 64) for seed in (1, 2)]
    runs.append(leave_run(tmp_path / "small", model__layers=[8, 8], lockstep=True))
    assert labels(*runs) == [
        "CartPole-v1 model.layers=[8,8] model.lstm=0 lockstep=true (1 seed)",
        "CartPole-v1 model.layers=[64,64] model.lstm=0 lockstep=false (2 seeds)",
        "CartPole-v1 model.layers=[64,64] model.lstm=64 lockstep=false (2 seeds)",
    ]


def test_groups_that_differ_in_many_settings_are_labelled_by_few_that_tell_them_apart(tmp_path: Path) -> None:
    """Runs of two algorithms differ in all that their presets set, and labels used to be screens long."""
    others = {"model__popart": False, "model__normalize": False, "store__capacity": 9, "algorithm__batch_size": 5}
    runs = [leave_run(tmp_path / "ppo"), leave_run(tmp_path / "dqn", algorithm__name="dqn", **others)]
    assert labels(*runs) == [
        "CartPole-v1 algorithm.name=dqn … (1 seed)",
        "CartPole-v1 algorithm.name=ppo … (1 seed)",
    ]
    slower = leave_run(tmp_path / "slower", algorithm__name="dqn", algorithm__learning_rate=1e-5, **others)
    assert labels(*runs, slower) == [
        "CartPole-v1 algorithm.name=dqn algorithm.learning_rate=1e-05 … (1 seed)",
        "CartPole-v1 algorithm.name=dqn algorithm.learning_rate=0.0003 … (1 seed)",
        "CartPole-v1 algorithm.name=ppo algorithm.learning_rate=0.0003 … (1 seed)",
    ]


def test_groups_are_in_the_order_of_their_labels_whatever_the_order_of_runs(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / str(number), model__lstm=number, seed=number) for number in (128, 16, 64, 8)]
    found = labels(*runs)
    assert [label.split()[1] for label in found] == [f"model.lstm={number}" for number in (8, 16, 64, 128)]


def test_groups_of_other_environments_do_not_lengthen_a_label(tmp_path: Path) -> None:
    pong = leave_run(tmp_path / "pong", env__id="Pong-v5", env__frame_stack=4, env__options={"episodic_life": True})
    assert labels(leave_run(tmp_path / "cartpole"), pong) == ["CartPole-v1 (1 seed)", "Pong-v5 (1 seed)"]


def test_groups_setting_an_older_run_lacks_counts_as_its_default(tmp_path: Path) -> None:
    old, new = leave_run(tmp_path / "old"), leave_run(tmp_path / "new", seed=2)
    settings = yaml.safe_load((old / "config.yaml").read_text())
    del settings["algorithm"]["discount"]
    (old / "config.yaml").write_text(yaml.safe_dump(settings))
    assert labels(old, new) == ["CartPole-v1 (2 seeds)"]


def test_common_grid_holds_a_run_before_its_start_and_after_its_end() -> None:
    grid, values = on_common_grid(
        [np.array([0.0, 99.0]), np.array([10.0, 20.0])], [np.array([0.0, 99.0]), np.array([5.0, 7.0])]
    )
    assert grid.tolist() == list(range(100))
    assert values[0].tolist() == list(range(100))
    assert (values[1, 0], values[1, 15], values[1, 99]) == (5.0, 6.0, 7.0)


# The table.


def test_table_has_a_line_for_each_group(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / str(seed), [(1000 * seed, 2.0, 10.0 * seed)], seed=seed) for seed in (1, 2, 3)]
    runs.append(leave_run(tmp_path / "lstm", [(500, 0.5, -1.0)], model__lstm=64))
    _, without, lstm = table(grouped([read_curve(run) for run in runs])).splitlines()
    assert without.split() == [
        "CartPole-v1",
        "model.lstm=0",
        "3",
        "20.00",
        "10.00…30.00",
        "1,000…3,000",
        "2.0",
        "1,000",
    ]
    assert lstm.split() == ["CartPole-v1", "model.lstm=64", "1", "-1.00", "–", "500", "0.5", "1,000"]


# The command.


def test_plot_of_two_environments_and_settings_is_written_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2, 3):
        leave_run(tmp_path / f"runs/a{seed}", seed=seed)
        leave_run(tmp_path / f"runs/b{seed}", seed=seed, model__lstm=64)
        leave_run(tmp_path / f"runs/c{seed}", seed=seed, env__id="Dollar$-v1$")
    out = tmp_path / "new" / "plot.png"
    run_plot(PlotConfig(runs=[str(tmp_path / "runs"), str(tmp_path / "runs" / "a1")], out=str(out)))
    assert out.read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert "CartPole-v1 model.lstm=64" in printed
    assert f"drawn in {out}" in printed


def test_plot_references_are_named_lines_in_every_panel(tmp_path: Path) -> None:
    out = tmp_path / "plot.svg"
    plot = ["plot", str(leave_run(tmp_path / "run")), "references={CleanRL PPO: 415, PQN: 385.5}", f"out={out}"]
    main(plot)
    drawn = out.read_text()  # matplotlib writes each text as a comment beside its outlines
    assert drawn.count("CleanRL PPO: 415") == drawn.count("PQN: 385.5") == 2


def test_plot_run_without_episodes_is_said_by_name_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, empty = leave_run(tmp_path / "good"), leave_run(tmp_path / "empty", [(5, 1.0, None)])
    damaged = leave_run(tmp_path / "damaged")
    (damaged / "config.yaml").write_text("a: [1")
    run_plot(PlotConfig(runs=[str(good), str(empty), str(damaged)], out=str(tmp_path / "x.png")))
    printed = capsys.readouterr().out
    assert f"{empty} is left out: no episode has ended in it\n" in printed
    assert f"{damaged} is left out: {damaged}/config.yaml cannot be read" in printed
    assert "CartPole-v1     1" in printed


def test_plot_without_anything_to_draw_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = leave_run(tmp_path / "empty", [])
    (tmp_path / "other").mkdir()
    for runs, words in (
        ([], "there is no run below runs/"),
        ([str(tmp_path / "nowhere")], "there is no .*nowhere; give run directories"),
        ([str(tmp_path / "other")], "there is no run in .*other"),
        ([str(empty)], "no episode has ended in any run of"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_plot(PlotConfig(runs=runs))


@pytest.mark.parametrize(("out", "words"), [("plot.doc", "must end in one of"), ("run/config.yaml/x.png", "written")])
def test_plot_into_a_file_that_cannot_be_is_refused(tmp_path: Path, out: str, words: str) -> None:
    run = leave_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        run_plot(PlotConfig(runs=[str(run)], out=str(tmp_path / out)))


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = leave_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'seedrl\[plot\]'"):
        run_plot(PlotConfig(runs=[str(run)], out=str(tmp_path / "x.png")))
    assert draw_curve(run) is None


def test_plot_command_takes_words_as_runs(commands: Commands) -> None:
    names = ["it's, a $run", "b"]
    for seed, name in enumerate(names):
        leave_run(commands.directory / name, seed=seed)
    code, out, err = commands.run("plot", *names, "out=both.png")
    assert (code, err) == (0, "")
    assert "drawn in both.png" in out
    assert (commands.directory / "both.png").exists()


def test_plot_command_without_runs_is_one_line(commands: Commands) -> None:
    code, _, err = commands.run("plot")
    assert code == 2
    assert err.startswith("seedrl plot: there is no run below runs/")
    assert err.count("\n") == 1


def test_plot_counts_runs_and_not_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(leave_run(tmp_path / name, seed=1)) for name in ("once", "again")]
    run_plot(PlotConfig(runs=runs, out=str(tmp_path / "x.png")))
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert (header.split()[1], row.split()[1]) == ("runs", "2")


def test_plot_without_a_word_draws_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_run(tmp_path / "runs" / "x", model__lstm=8)
    run_plot(PlotConfig(out="x.png"))
    assert "CartPole-v1" in capsys.readouterr().out


def test_plot_command_word_after_an_option_is_the_options(commands: Commands) -> None:
    code, out, _ = commands.run("plot", "a", "--cfg", "job", "b")
    assert code == 0
    assert yaml.safe_load(out)["runs"] == ["a", "b"]


def test_plot_help_shows_where_words_go(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plot", "--help"])
    assert capsys.readouterr().out.startswith("seedrl plot RUNS … key=value …")


# One run.


def test_draw_curve_writes_into_the_run_directory(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run")
    drawn = draw_curve(run)
    assert drawn == run / "curve.png"
    assert drawn.read_bytes().startswith(PNG)


def test_draw_curve_shows_evaluation_beside_training(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", [])
    rows = [{"env_steps": n, "seconds": n, "return_mean_100": n, "eval_return_mean_100": 2 * n or None} for n in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert np.isnan(read_curve(run).evaluations[0])
    assert read_curve(run).evaluations[1] == 2
    assert draw_curve(run) is not None


def test_draw_curve_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk's."""
    run = leave_run(tmp_path / "run")
    before = draw_curve(run)
    assert before is not None
    picture = before.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert draw_curve(run) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert before.read_bytes() == picture
    assert not list(run.glob(".*png*"))


def test_draw_curve_one_point_is_drawn(tmp_path: Path) -> None:
    assert draw_curve(leave_run(tmp_path / "run", [(0, 0.0, 0.0)])) is not None


def test_draw_curve_without_an_episode_is_none(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", [(5, 1.0, None)])
    assert draw_curve(run) is None
    assert not (run / "curve.png").exists()


def test_draw_curve_bad_data_is_none_and_never_raises(tmp_path: Path) -> None:
    broken, nowhere = leave_run(tmp_path / "broken"), tmp_path / "nowhere"
    (broken / "metrics.jsonl").write_bytes(bytes(range(256)))
    odd = leave_run(tmp_path / "odd")
    (odd / "config.yaml").write_text("env: 3\nseed: [1]\n")
    taken = leave_run(tmp_path / "taken")
    (taken / "curve.png").mkdir()
    assert draw_curve(broken) is None
    assert draw_curve(nowhere) is None
    assert draw_curve(taken) is None
    assert draw_curve(odd) == odd / "curve.png"
