"""The page and the plots that `seedrl bench render` makes, from results made up here."""

import json
import sys
from pathlib import Path

import pytest

from bench import plots
from bench.document import read
from bench.harness import Ratio, Report, write
from bench.learning import Curve
from bench.results import render, text
from seedrl.errors import ConfigError
from tests.test_bench_learning import learned

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG"


def suite(path: Path) -> Path:
    """Every stage that has a plot, with the columns it has."""
    pool, batcher, inference, service = (Report(name) for name in ("pool", "batcher", "inference", "service"))
    for env in ("Pong-v5", "CartPole-v1"):
        for threads in (1, 2):
            pool.add({"env": env, "threads": threads, "groups": 1, "steps per second": 2500.0 * threads})
    for producers in (1, 4):
        batcher.add({"producers": producers, "wait p50 µs": 12.0, "wait p99 µs": 310.0})
    for rows in (8, 64):
        for side in ("serving", "bare"):
            inference.add({"side": side, "rows": rows, "rows per CPU-second": 3000.0})
    inference.add_ratio(Ratio("inference_over_bare", [0.8, 0.95, 0.85], 0.9, at_most=False, wall=[0.8, 0.9, 0.7]))
    for actors, envs in ((1, 128), (32, 4096), (1, 4096)):
        side = "service" if envs == 128 * actors else "service, batches of 128"
        service.add({"side": side, "actors": actors, "envs": envs, "CPU µs per row": 21.5})
    service.add_ratio(Ratio("service_over_echo", [1.2, 1.3, 1.4], bound=1.5))
    service.add_ratio(Ratio("unbounded", [1.2]))
    service.note("a note")
    learner = Report("learner")
    learner.add({"side": "bare", "unrolls": 8, "steps per CPU-second": 900.0})
    weights = Report("weights_or_observations")
    costs = {"publish": 9e3, "weights": 300.0, "observations": 350.0, "observations with accelerator": 18.0}
    weights.detail = {"pong_nature": costs}
    wire, end_to_end, peers = Report("wire"), Report("end_to_end"), Report("peers")
    plain = {"bytes per row": 84 * 84, "in flight": 2, "actors": 1, "transport": "unix"}
    for side in ("stream", "echo"):
        wire.add({"side": side, "rows": 64, "CPU µs per row": 12.0, **plain})
        peers.add({"side": side, "env": "pong", "steps per second": 900.0})
    end_to_end.add({"part": "env", "ms alone": 0.4})
    end_to_end.add({"part": "actor process", "ms in the run": 0.5})
    simulation = Report("simulation")
    for of in ("steps/s", "round trip ms"):
        simulation.add({"check": "tiny, 1 actors", "of": of, "simulated": 800.0, "measured": 790.0})
    for size in ("one rack", "one rack by link", "a thousand actors"):
        reached = {"steps/s": 1e5, "p50 ms": 3.0, "p99 ms": 9.0, "policy lag": 4.0}
        simulation.add({"size": size, "actors": 32, "ranks": 1, "Gbit/s": 10, **reached})
    reports = [pool, wire, batcher, inference, learner, service, end_to_end, simulation, weights, peers]
    write(path, [*reports, learned({"cartpole": [475.0, 480.0]})])
    return path


def rendered_in(directory: Path) -> Path:
    """Return the results whose page and plots were made there."""
    results = suite(directory / "results" / "results.json")
    render(results, directory / "RESULTS.md")
    return results


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with page and plots, made once: all plots take seconds."""
    return rendered_in(tmp_path_factory.mktemp("rendered"))


def test_render_makes_every_plot_and_a_page_that_shows_them(rendered: Path) -> None:
    results = rendered
    page = (rendered.parents[1] / "RESULTS.md").read_text()
    shown = plots.names(read(results))
    assert set(shown) == {plots.OVERVIEW, *plots.PANELS, *plots.OWN}
    for name in shown:
        assert (results.parent / f"{name}.png").read_bytes().startswith(PNG)
        assert f"](results/{name}.png)" in page


def test_render_same_results_give_the_same_bytes(rendered: Path, tmp_path: Path) -> None:
    again = tmp_path / "results" / "results.json"
    again.parent.mkdir()
    again.write_bytes(rendered.read_bytes())  # they hold the time of the measurement
    render(again, tmp_path / "RESULTS.md")
    names = sorted(path.name for path in rendered.parent.glob("*.png"))
    assert names == sorted(path.name for path in again.parent.glob("*.png"))
    assert [name for name in names if (rendered.parent / name).read_bytes() != (again.parent / name).read_bytes()] == []
    assert (rendered.parents[1] / "RESULTS.md").read_text() == (tmp_path / "RESULTS.md").read_text()


def test_page_says_what_was_met_and_what_was_missed(tmp_path: Path) -> None:
    results = suite(tmp_path / "results.json")
    page = text(read(results), results, tmp_path / "RESULTS.md").splitlines()
    assert "| inference_over_bare | 0.85 | 0.8 … 0.95 | 3 | 0.7 … 0.9 | ≥ 0.9 | **missed** |" in page
    assert "| service_over_echo | 1.3 | 1.2 … 1.4 | 3 | – | ≤ 1.5 | met |" in page
    assert "| unbounded | 1.2 | 1.2 … 1.2 | 1 | – | none; less is better | – |" in page
    assert "| Pong-v5 | 2 | 1 | 5,000 |" in page
    assert "- a note" in page


def test_page_of_one_stage_has_no_plots_it_lacks(tmp_path: Path) -> None:
    report = Report("other")
    report.add({"rows": 64, "µs": 1.0})
    write(tmp_path / "other.json", [report])
    render(tmp_path / "other.json", tmp_path / "RESULTS.md")
    assert "![" not in (tmp_path / "RESULTS.md").read_text()
    assert list(tmp_path.glob("*.png")) == []


def test_plot_of_a_table_without_the_column_says_which(tmp_path: Path) -> None:
    report = Report("inference")
    report.add({"rows": 64, "side": "bare"})
    write(tmp_path / "inference.json", [report])
    with pytest.raises(ConfigError, match="stage inference have no 'rows per CPU-second'"):
        plots.draw(read(tmp_path / "inference.json"), tmp_path)


def test_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"\.\[bench\]"):
        plots.draw(read(suite(tmp_path / "results.json")), tmp_path)


def test_curve_of_a_run_has_the_fields_plots_read() -> None:
    assert {"task", "target", "env_steps", "seconds", "returns"} <= set(Curve.__slots__)


@pytest.mark.skipif(not (ROOT / "bench/RESULTS.md").exists(), reason="nothing is published")
def test_published_page_is_what_the_results_beside_it_give() -> None:
    page, results = ROOT / "bench/RESULTS.md", ROOT / "bench/results/results.json"
    document = read(results)
    assert page.read_text() == text(document, results, page), "run seedrl bench render; never edit it"
    assert {f"{name}.png" for name in plots.names(document)} == {path.name for path in results.parent.glob("*.png")}
    assert json.loads(results.read_text())["fingerprint"]["commit"]
