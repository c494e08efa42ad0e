"""What a run goes on from: everything, or only the weights of another run."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from seedrl.algorithms.settings import Optimizer
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.metrics import Kind, LearningMetrics, ServingMetrics, declared, totals_of
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.saving import save as save_checkpoint
from seedrl.run.snapshot import Resumable, initial_weights, load_weights, spec_of
from seedrl.run.totals import counts_of, restore_counters
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, decoded_spec, discrete, encoded_spec
from tests.builders import LearnerParts, learner_parts, one_step, same, weights
from tests.fakes import TinyModel, make_spec


@dataclasses.dataclass
class Run:
    """The parts of a learner process that a snapshot is about."""

    parts: LearnerParts
    resumable: Resumable
    serving: ServingMetrics = dataclasses.field(default_factory=ServingMetrics)
    said: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def fresh(cls, seed: int = 0, optimizer: Optimizer = Optimizer.adam, spec: EnvSpec | None = None) -> "Run":
        parts = learner_parts(one_step(optimizer=optimizer), spec=spec, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return cls(parts, Resumable(parts.learner, generator, parts.spec, parts.config.algorithm))

    def resume(self, path: Path) -> float:
        """As a learner process does; the seconds the run had taken."""
        checkpoint = files.load(path)
        restore_counters(checkpoint.state, self.serving, self.parts.metrics)
        return self.resumable.restore(checkpoint, self.said.append)

    def train(self, batches: range) -> None:
        """Updates on train batches that depend on their number and on the weights that act."""
        for number in batches:
            self.parts.record(seed=number, policy_version=self.parts.metrics.updates)
            self.parts.update()
            self.parts.learner.publish(self.parts.policy)

    def save(self, run_directory: Path, env_steps: int = 100) -> Path:
        taken = self.resumable.take(seconds=12.5, counts=counts_of(self.serving, self.parts.metrics))
        return save_checkpoint(run_directory / "checkpoints", env_steps, taken, keep=3)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.parts.learner.model)


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_resumable_restored_run_equals_an_uninterrupted_one(tmp_path: Path, optimizer: Optimizer) -> None:
    """Invariant 10: weights, optimiser, random numbers and counters, bit for bit."""
    run = Run.fresh(optimizer=optimizer)
    run.train(range(3))
    torch.rand(7, generator=run.resumable.generator)
    path = run.save(tmp_path)

    resumed = Run.fresh(seed=9, optimizer=optimizer)
    assert resumed.resume(path) == 12.5
    for each in (run, resumed):
        each.train(range(3, 6))
    assert same(resumed.weights, run.weights)
    assert same(*(files.pack_optimizer(each.parts.learner._optimizer) for each in (resumed, run)))
    assert torch.equal(*(torch.rand(5, generator=each.resumable.generator) for each in (resumed, run)))
    assert resumed.parts.metrics.updates == run.parts.metrics.updates == 6
    assert resumed.parts.metrics.policy_lag == run.parts.metrics.policy_lag
    assert resumed.parts.metrics.trained_steps == run.parts.metrics.trained_steps


def drawn_after_resuming(checkpoint: Checkpoint, seed: int) -> tuple[list[float], list[str]]:
    """Return the next random numbers of a run that resumes from there, and what it says."""
    run = Run.fresh(seed=seed)
    run.resumable.restore(checkpoint, run.said.append)
    return torch.rand(5, generator=run.resumable.generator).tolist(), run.said


def test_resumable_generator_of_another_device_is_seeded_again_and_said() -> None:
    """A CUDA generator has a state of 16 bytes, one of the CPU has 5056."""
    run = Run.fresh()
    run.train(range(3))
    taken = run.resumable.take(seconds=1.0, counts=counts_of(run.serving, run.parts.metrics))
    foreign = taken._replace(tensors={**taken.tensors, "generator": torch.zeros(16, dtype=torch.uint8)})
    drawn, said = drawn_after_resuming(foreign, seed=5)
    assert len(said) == 1
    assert "another kind of device than cpu" in said[0]
    assert "3 updates" in said[0]
    assert drawn == drawn_after_resuming(foreign, seed=5)[0], "repeatable"
    later = foreign._replace(state={**foreign.state, "learning": {**foreign.state["learning"], "updates": 4}})
    assert drawn not in (drawn_after_resuming(later, seed=5)[0], drawn_after_resuming(foreign, seed=6)[0])
    assert drawn_after_resuming(taken, seed=5)[1] == []


def count_everything(metrics: ServingMetrics | LearningMetrics) -> None:
    """Gives every counter, of every label and bucket, a value of its own."""
    for number, (name, declaration) in enumerate(declared(type(metrics)), start=1):
        if declaration.kind is Kind.histogram:
            histogram = getattr(metrics, name)
            histogram.counts, histogram.sum = [number + 100 * at for at in range(len(histogram.counts))], float(number)
        elif declaration.kind is Kind.counter and declaration.label:
            values = getattr(metrics, name)
            values.update({value: number + 100 * at for at, value in enumerate(declaration.values)})
        elif declaration.kind is Kind.counter:
            setattr(metrics, name, number)


def test_resumable_restores_every_counter(tmp_path: Path) -> None:
    """All that the metrics hold, so that a counter added later is not forgotten here."""
    run = Run.fresh()
    for metrics in (run.serving, run.parts.metrics):
        count_everything(metrics)
    run.serving.returns.extend([0.1, -2.5])
    run.serving.lengths.extend([10, 20])
    resumed = Run.fresh()
    resumed.resume(run.save(tmp_path))
    assert resumed.serving == run.serving
    assert totals_of(resumed.parts.metrics) == totals_of(run.parts.metrics)


def test_resumable_returns_stay_the_last_hundred(tmp_path: Path) -> None:
    run = Run.fresh()
    run.serving.returns.extend(range(150))
    resumed = Run.fresh()
    resumed.resume(run.save(tmp_path))
    resumed.serving.returns.append(150.0)
    assert list(resumed.serving.returns) == list(range(51, 151))


def test_resumable_learning_rate_comes_from_the_settings_not_the_snapshot(tmp_path: Path) -> None:
    path = Run.fresh().save(tmp_path)
    resumed = Run.fresh()
    resumed.parts.learner._optimizer.param_groups[0]["lr"] = 0.125
    resumed.resume(path)
    assert resumed.parts.learner._optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("spec", [make_spec((3,)), make_spec(dtype="float64"), make_spec(num_actions=4)], ids=str)
def test_spec_of_checkpoint_is_that_of_the_run(tmp_path: Path, spec: EnvSpec) -> None:
    assert spec_of(files.load(Run.fresh(spec=spec).save(tmp_path))) == spec


# The weights of another run.


def test_initial_weights_of_a_run_directory_are_of_its_newest_checkpoint(tmp_path: Path) -> None:
    run = Run.fresh()
    run.save(tmp_path, env_steps=100)
    run.train(range(2))
    run.save(tmp_path, env_steps=200)
    other = Run.fresh(seed=5)
    load_weights(other.parts.learner.model, initial_weights(str(tmp_path), pytest.fail))
    assert same(other.weights, run.weights)
    assert other.parts.metrics.updates == 0


def test_initial_weights_of_a_checkpoint_directory_are_its_own(tmp_path: Path) -> None:
    run = Run.fresh()
    first, before = run.save(tmp_path, env_steps=100), run.weights
    run.train(range(2))
    run.save(tmp_path, env_steps=200)
    other = Run.fresh(seed=5)
    load_weights(other.parts.learner.model, initial_weights(str(first), pytest.fail))
    assert same(other.weights, before)


def test_initial_weights_of_a_run_with_a_damaged_checkpoint_are_of_the_one_before(tmp_path: Path) -> None:
    run = Run.fresh()
    run.save(tmp_path, env_steps=100)
    (run.save(tmp_path, env_steps=200) / files.TENSORS).unlink()
    warnings: list[str] = []
    other = Run.fresh(seed=5)
    load_weights(other.parts.learner.model, initial_weights(str(tmp_path), warnings.append))
    assert same(other.weights, run.weights)
    assert len(warnings) == 1


def test_initial_weights_of_a_damaged_checkpoint_directory_are_refused(tmp_path: Path) -> None:
    path = Run.fresh().save(tmp_path)
    (path / files.STATE).write_text("{}")
    with pytest.raises(RunDirectoryError, match="does not match its manifest"):
        initial_weights(str(path), pytest.fail)


@pytest.mark.parametrize("name", ["", "absent", "file"])
def test_initial_weights_of_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    source = str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"init_from={source} is neither a checkpoint nor a run directory"):
        initial_weights(source, pytest.fail)


@pytest.mark.parametrize(
    ("spec", "core_size"), [(make_spec((3,)), 0), (make_spec(num_actions=4), 0), (make_spec(), 2)], ids=str
)
def test_load_weights_of_another_model_are_refused(tmp_path: Path, spec: EnvSpec, core_size: int) -> None:
    checkpoint = files.load(Run.fresh().save(tmp_path))
    with pytest.raises(
        RunDirectoryError, match=r"the checkpoint does not fit this model: .* is (only )?(\[|here)"
    ) as refusal:
        load_weights(TinyModel(spec, core_size), checkpoint)
    assert "\n" not in str(refusal.value)
    assert "an environment with other spaces" in str(refusal.value)


def test_load_weights_of_a_checkpoint_without_any_are_refused() -> None:
    with pytest.raises(RunDirectoryError, match=r"does not fit this model: .* is only here"):
        load_weights(TinyModel(make_spec()), Checkpoint({}, {}))


@pytest.mark.parametrize(
    "spec",
    [
        make_spec((1, 84, 84), "uint8", 6),
        EnvSpec(
            {"a": ArraySpec((), "int64", 5), "b/c": ArraySpec((2,), "float32")}, {"x": discrete(2), "y": discrete(3)}
        ),
        EnvSpec(ArraySpec((3,), "float32"), ContinuousSpec((-1.0, float("-inf")), (0.1, float("inf")), (2,))),
    ],
    ids=["image", "dict", "infinite"],
)
def test_spaces_survive_their_plain_json_form(spec: EnvSpec) -> None:
    assert decoded_spec(json.loads(json.dumps(encoded_spec(spec)))) == spec


def test_spaces_in_another_form_are_refused_in_words() -> None:
    old = {"observation": [{"shape": [4], "dtype": "float32"}], "action": [{"choices": [2]}]}
    with pytest.raises(RunDirectoryError, match="holds its spaces in a form that this version of seedrl does not read"):
        spec_of(Checkpoint({}, {"spec": old}))


def test_resumable_holds_the_algorithm_as_it_was_resolved() -> None:
    run = Run.fresh()
    taken = run.resumable.take(seconds=1.0, counts=counts_of(run.serving, run.parts.metrics))
    assert json.loads(json.dumps(taken.state))["algorithm"] == {
        "name": "vtrace",
        "passes": 1,
        "minibatches": 1,
        "on_policy": False,
    }


def test_resumable_of_another_algorithm_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    """Also without a config.yaml; its weights alone can be loaded, as init_from does."""
    path = Run.fresh(seed=3).save(tmp_path)
    other = Run.fresh()
    other.resumable.algorithm.name = "ppo"
    before = other.weights
    with pytest.raises(
        RunDirectoryError, match=r"the run is trained with vtrace, and algorithm\.name=ppo cannot resume"
    ):
        other.resume(path)
    assert same(other.weights, before)
    load_weights(other.parts.learner.model, initial_weights(str(tmp_path), warn=print))
    assert not same(other.weights, before)
