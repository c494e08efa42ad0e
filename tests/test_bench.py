"""The judge itself: how turns are taken, ratios made and verdicts given. What it measures is not tested here."""

import json
from pathlib import Path

import pytest

from bench.harness import Ratio, Report, Turn, interleave, paired, run_for, write
from bench.main import run_bench
from bench.rig import NullModel, ServingRig, private_address
from seedrl.config import ActorConfig, BenchConfig, LearnerConfig
from seedrl.errors import ConfigError
from tests.fakes import FakePool
from tests.integration.support import RunningActor
from tests.integration.waiting import eventually


def turn(count: float, cpu: float) -> Turn:
    return Turn(count, wall=1.0, cpu=cpu)


def test_interleave_sides_take_turns_and_alternate_who_goes_first() -> None:
    order: list[str] = []

    def side(name: str) -> Turn:
        order.append(name)
        return turn(1, 1)

    interleave({"a": lambda: side("a"), "b": lambda: side("b")}, repeats=3)
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_run_for_goes_on_until_something_was_done_however_little_time_there_is() -> None:
    done = iter([0, 0, 3])
    assert run_for(0.0, lambda: next(done)).count == 3


def test_paired_divides_neighbouring_turns() -> None:
    turns = {"ours": [turn(1, 3.0), turn(1, 8.0)], "floor": [turn(1, 2.0), turn(1, 4.0)]}
    assert paired(turns, "ours", "floor", lambda each: each.cpu) == [1.5, 2.0]


@pytest.mark.parametrize(
    ("values", "at_most", "met"), [([1.0, 9.0, 1.4], True, True), ([1.6], True, False), ([1.6], False, True)]
)
def test_ratio_verdict_is_that_of_the_median(values: list[float], at_most: bool, met: bool) -> None:
    ratio = Ratio("r", values, bound=1.5, at_most=at_most)
    assert ratio.met is met
    assert ("MISSED" in ratio.sentence()) is not met


def test_write_stage_has_its_ratios_spread_and_machine_on_top(tmp_path: Path) -> None:
    report = Report("service")
    report.add_ratio(Ratio("service_over_echo", [1.2, 1.4, 1.3], bound=1.5))
    write(tmp_path / "out" / "service.json", [report])
    document = json.loads((tmp_path / "out" / "service.json").read_text())
    assert document["ratios"] == {"service_over_echo": 1.3}
    assert document["spread"] == {"service_over_echo": [1.2, 1.4]}
    assert document["fingerprint"]["cores"] >= 1


def test_write_suite_joins_the_ratios_of_its_stages(tmp_path: Path) -> None:
    first, second = Report("a"), Report("b")
    first.add_ratio(Ratio("x", [1.0]))
    second.add_ratio(Ratio("y", [2.0]))
    write(tmp_path / "all.json", [first, second])
    assert json.loads((tmp_path / "all.json").read_text())["ratios"] == {"x": 1.0, "y": 2.0}


def test_write_of_one_stage_into_a_suite_keeps_the_others(tmp_path: Path) -> None:
    path, before, after = tmp_path / "all.json", Report("wire"), Report("wire")
    before.note("then")
    after.note("now")
    write(path, [before, Report("service")])
    write(path, [after])
    stages = {stage["stage"]: stage for stage in json.loads(path.read_text())["stages"]}
    assert list(stages) == ["wire", "service"]
    assert stages["wire"]["notes"] == ["now"]


def test_run_bench_stage_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "batcher.json"
    run_bench(BenchConfig(stage="batcher", seconds=0.02, repeats=1, out=str(out)))
    assert [row["producers"] for row in json.loads(out.read_text())["table"]] == [1, 4, 16]


def test_run_bench_unknown_stage_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stage=wires is not one of all, pool"):
        run_bench(BenchConfig(stage="wires"))


def test_serving_rig_serves_an_actor_and_leaves_nothing_behind() -> None:
    config = LearnerConfig()
    config.algorithm.unroll_length, config.store.capacity = 3, 8
    config.actors.envs, config.serving.max_slots = 4, 4
    with private_address() as config.listen:
        with ServingRig(config, lambda spec: NullModel(spec.policy_size)) as rig:
            actor = RunningActor(ActorConfig(learner=config.listen), FakePool)
            eventually(lambda: rig.served == 1 and rig.metrics.unrolls_made > 8)  # more than fit: the others were freed
        actor.join()
