"""C9: memory is counted before it is taken, and what does not fit is refused."""

import pytest
import torch

from seedrl.actions import Actions
from seedrl.algorithms.base import networks_of
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig, Optimizer
from seedrl.config import LearnerConfig, ModelConfig, StoreDevice
from seedrl.errors import ConfigError, Mismatch
from seedrl.models.build import build_model
from seedrl.policy import Policy
from seedrl.run import budget as budgets
from seedrl.run.budget import (
    Budget,
    budget_of,
    check_budget,
    check_store,
    checkpoint_bytes,
    free_bytes,
    serving_budget,
)
from seedrl.run.checkpoint import pack_optimizer
from seedrl.selection.fifo import Fifo
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.store import Store, StoreSizes
from tests.builders import learner_parts
from tests.fakes import TinyModel, make_spec

CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_budget_is_what_the_parts_take(optimizer: Optimizer) -> None:
    spec = make_spec((50,))
    model = TinyModel(spec, core_size=3)
    parts = learner_parts(model=model, spec=spec)
    parts.config.algorithm.optimizer = optimizer
    parts = learner_parts(parts.config.algorithm, model=model, spec=spec)
    parts.record()
    parts.update()

    algorithm = parts.learner._algorithm
    budget = budget_of(parts.config, spec, model, algorithm)
    assert budget.store == Store(spec, Fifo(), StoreSizes.of(parts.config, 3), CPU).columns.nbytes
    models = [model, *Policy(model, version=0)._replicas]
    own = sum(each.nbytes for each in algorithm.tensors().values())
    assert budget.weights == sum(each.nbytes for copy in models for each in copy.parameters()) + own
    gradients = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    averages = sum(each.nbytes for each in pack_optimizer(parts.learner._optimizer).values())
    assert averages <= budget.optimizer - gradients + 64  # and a few counts of steps
    assert budget.optimizer - gradients <= averages
    saved = sum(each.nbytes for each in parts.learner.tensors().values())
    assert saved - 64 <= checkpoint_bytes(parts.config, model, algorithm) <= saved


def test_budget_of_an_algorithm_with_critics_and_target_networks_counts_them() -> None:
    spec = EnvSpec(ArraySpec((3,), "float32"), ContinuousSpec((-1.0,), (1.0,), (1,)))
    model = build_model(
        ModelConfig(layers=[16], squash=True, state_std=True, popart=False, normalize=False), spec, seed=1
    )
    config = LearnerConfig(algorithm=AlgorithmConfig(name="sac"))
    sac = build_algorithm(config.algorithm, Actions(spec, squash=True), model)
    critics = sum(each.nbytes for each in networks_of(sac).parameters())
    targets = sum(each.nbytes for name, each in sac.tensors().items() if name.startswith("target."))
    assert 0 < targets <= critics

    without = build_algorithm(
        AlgorithmConfig(passes=1, minibatches=1, entropy_cost=0.0), Actions(spec, squash=True), model
    )
    budget, plain = budget_of(config, spec, model, sac), budget_of(config, spec, model, without)
    assert (
        critics + targets <= budget.weights - plain.weights <= critics + targets + 10_000
    )  # the random numbers' state
    assert budget.optimizer - plain.optimizer == 3 * critics
    assert checkpoint_bytes(config, model, sac) - checkpoint_bytes(config, model, without) >= 3 * critics + targets


def test_budget_of_q_learning_counts_its_target_network_once_and_no_optimizer_for_it() -> None:
    spec = make_spec((50,))
    model = build_model(ModelConfig(layers=[16], popart=False, normalize=False), spec, seed=1)
    config = LearnerConfig(algorithm=AlgorithmConfig(name="dqn", passes=1, minibatches=1))
    dqn, pqn = (
        build_algorithm(AlgorithmConfig(name=name, passes=1, minibatches=1), Actions(spec), model)
        for name in ("dqn", "pqn")
    )
    target = sum(each.nbytes for each in model.state_dict().values())
    budget, plain = budget_of(config, spec, model, dqn), budget_of(config, spec, model, pqn)
    assert target <= budget.weights - plain.weights <= target + 64  # and a count of steps
    assert budget.optimizer == plain.optimizer == 3 * sum(each.nbytes for each in model.parameters())


def test_budget_of_serving_alone_has_no_optimizer_and_the_store_it_is_given() -> None:
    spec = make_spec((50,))
    model = TinyModel(spec)
    sizes = StoreSizes.of(LearnerConfig(), 0)._replace(capacity=0)
    budget = serving_budget(spec, model, sizes)
    columns = Store(spec, Fifo(), sizes, CPU).columns
    assert budget == (columns.nbytes, 3 * sum(each.nbytes for each in model.parameters()), 0, columns.host_nbytes)


def test_budget_of_a_ring_too_large_for_any_machine_is_refused_before_anything_is_allocated() -> None:
    config = LearnerConfig()
    config.store.select, config.store.capacity = "uniform", 10**12
    with pytest.raises(Mismatch, match=r"the store for .* does not fit: the learner needs .* store.capacity"):
        check_store(config, CPU, make_spec((2,)))


def test_budget_of_a_store_in_main_memory_takes_nothing_of_the_device() -> None:
    config, spec, model = LearnerConfig(), make_spec((50,)), TinyModel(make_spec((50,)))
    algorithm = learner_parts(model=model, spec=spec).learner._algorithm
    there = budget_of(config, spec, model, algorithm)
    config.store.device = StoreDevice.host
    here = budget_of(config, spec, model, algorithm)
    assert (here.store, here.host) == (0, there.store + there.host)
    assert here.total == there.total


def test_budget_beside_an_accelerator_has_to_fit_the_device_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, cuda = Budget(store=30, weights=2, optimizer=1, host=20), torch.device("cuda")
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 33 if device.type == "cuda" else 20)
    check_budget(budget, cuda)
    with pytest.raises(ConfigError, match="of them on cpu"):
        check_budget(budget._replace(host=21), cuda)
    with pytest.raises(ConfigError, match="of them on cuda"):
        check_budget(budget._replace(store=31), cuda)


def test_free_bytes_of_this_machine_is_positive() -> None:
    assert (free_bytes(CPU) or 0) > 0


def test_budget_that_fits_is_granted_and_one_that_does_not_is_refused_with_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = Budget(store=300 * 2**20, weights=20 * 2**20, optimizer=2**20)
    monkeypatch.setattr(budgets, "free_bytes", lambda _: budget.total)
    check_budget(budget, CPU)
    monkeypatch.setattr(budgets, "free_bytes", lambda _: budget.total - 1)
    words = r"needs 321\.0 MiB \(store 300\.0, weights 20\.0, optimizer 1\.0, host 0\.0\), 321\.0 of them on cpu"
    with pytest.raises(ConfigError, match=words):
        check_budget(budget, CPU)


def test_budget_of_a_store_alone_that_does_not_fit_refuses_the_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda _: 2**21)
    config = LearnerConfig(algorithm=AlgorithmConfig(unroll_length=20))
    check_store(config, CPU, make_spec((2,)))
    with pytest.raises(Mismatch, match=r"spaces: the store for .* does not fit"):
        check_store(config, CPU, make_spec((4, 84, 84), "uint8"))


def test_budget_where_the_system_does_not_say_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda _: None)
    check_budget(Budget(2**60, 0, 0), CPU)
    check_store(LearnerConfig(), CPU, make_spec((2,)))
