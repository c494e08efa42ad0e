"""PPO against a slow transcription in plain loops: GAE, the clipped loss, whole updates; and its minibatches."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import normalized
from seedrl.algorithms.base import Loss
from seedrl.algorithms.minibatches import Minibatches, Rows
from seedrl.algorithms.ppo import PPO
from seedrl.algorithms.settings import AlgorithmConfig, PPOConfig, Targets
from seedrl.config import ModelConfig
from seedrl.models.build import build_model
from seedrl.specs import EnvSpec
from seedrl.types import Unrolls
from tests.builders import learner_parts, one_step, same, weights
from tests.fakes import TinyModel, make_spec
from tests.oracles import random_unrolls

torch.set_num_threads(1)  # for tensors this small a second thread only waits

SPEC = make_spec((2,), num_actions=3)


def ppo_config(ppo: PPOConfig | None = None, **settings: object) -> AlgorithmConfig:
    """Return settings of PPO as published, in one gradient step unless told otherwise."""
    defaults = {"name": "ppo", "trace_lambda": 0.9, "ppo": ppo or PPOConfig(targets=Targets.gae)}
    return one_step(**{**defaults, **settings})


def unrolls_of(seed: int = 0, *, length: int = 5, batch: int = 4, actions: int = 3) -> Unrolls:
    unrolls = random_unrolls(length, batch, actions, seed)
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(length + 1, batch, 2, generator=generator)
    inputs = unrolls.inputs._replace(observation=observation, reward=unrolls.inputs.reward.float())
    return unrolls._replace(inputs=inputs, behavior_logits=unrolls.behavior_logits.float())


def slow_gae(unrolls: Unrolls, discount: float, trace_lambda: float) -> np.ndarray:
    """Equation 11 and 12 of arXiv:1707.06347, one transition after the other; NaN where there is no transition."""
    reward, value = unrolls.inputs.reward.double().numpy(), unrolls.behavior_value.double().numpy()
    terminated, truncated = unrolls.terminated.numpy(), unrolls.truncated.numpy()
    length, batch = len(reward) - 1, reward.shape[1]
    advantage = np.full((length, batch), np.nan)
    for b in range(batch):
        following = 0.0
        for t in reversed(range(length)):
            if terminated[t, b] or truncated[t, b]:
                following = 0.0
                continue
            goes_on = 0.0 if terminated[t + 1, b] else 1.0
            delta = reward[t + 1, b] + discount * goes_on * value[t + 1, b] - value[t, b]
            is_last = terminated[t + 1, b] or truncated[t + 1, b]
            following = delta + (0.0 if is_last else discount * trace_lambda * following)
            advantage[t, b] = following
    return advantage


def slow_loss(model: nn.Module, unrolls: Unrolls, config: AlgorithmConfig, cells: list[tuple[int, int]]) -> Tensor:
    """Return the loss of some transitions (t, b), added up one by one; the model has no memory and PopArt is off."""
    gae = slow_gae(unrolls, config.discount, config.trace_lambda)
    known = gae[~np.isnan(gae)]
    mean, deviation = (known.mean(), known.std()) if config.normalize_advantage else (0.0, 1.0)
    output, _ = model(unrolls.inputs, unrolls.core_state)
    total, count = torch.zeros(()), 0
    for t, b in cells:
        if np.isnan(gae[t, b]):
            continue
        count += 1
        action = int(unrolls.action[t, b])
        old = torch.log_softmax(unrolls.behavior_logits[t, b], 0)[action]
        log_policy = torch.log_softmax(output.logits[t, b], 0)
        ratio = torch.exp(log_policy[action] - old)
        advantage = (gae[t, b] - mean) / (deviation + 1e-8)
        clipped = min(max(ratio.item(), 1 - config.ppo.clip), 1 + config.ppo.clip)
        is_free = ratio.item() * advantage <= clipped * advantage
        gain = ratio * advantage if is_free else torch.tensor(clipped * advantage)
        target = gae[t, b] + float(unrolls.behavior_value[t, b])
        error = (target - output.value[t, b]) ** 2
        if config.ppo.value_clip:
            before = float(unrolls.behavior_value[t, b])
            moved = before + torch.clamp(output.value[t, b] - before, -config.ppo.value_clip, config.ppo.value_clip)
            error = torch.maximum(error, (target - moved) ** 2)
        entropy = -(log_policy.exp() * log_policy).sum()
        assert config.entropy_cost is not None
        total = total - gain + config.value_cost * 0.5 * error - config.entropy_cost * entropy
    return (total / max(count, 1)).float()


def everything(unrolls: Unrolls) -> list[tuple[int, int]]:
    length, batch = unrolls.terminated[1:].shape
    return [(t, b) for t in range(length) for b in range(batch)]


def tiny(spec: EnvSpec = SPEC, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return TinyModel(spec)


def ppo(config: AlgorithmConfig, model: nn.Module) -> PPO:
    return PPO(config, Actions(SPEC), model)


def first_loss(algorithm: PPO, unrolls: Unrolls, model: nn.Module, fraction: float = 0.0) -> Loss:
    return algorithm.loss(next(algorithm.batches(unrolls)), model, fraction)


@pytest.mark.parametrize("trace_lambda", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_the_sum_one_transition_after_the_other(seed: int, trace_lambda: float) -> None:
    unrolls = unrolls_of(seed, length=8)
    algorithm = ppo(ppo_config(trace_lambda=trace_lambda), tiny())
    rows = next(algorithm.batches(unrolls))
    found = rows.given["advantage"].view(8, 4)
    expected = slow_gae(unrolls, 0.99, trace_lambda)
    assert torch.equal(rows.given["valid"].view(8, 4), torch.from_numpy(~np.isnan(expected)))
    known = ~np.isnan(expected)
    np.testing.assert_allclose(found.numpy()[known], expected[known], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
@pytest.mark.parametrize("normalize", [False, True])
def test_ppo_loss_and_gradient_equal_a_slow_transcription(normalize: bool, value_clip: float) -> None:
    unrolls, model = unrolls_of(1), tiny()
    settings = PPOConfig(clip=0.1, value_clip=value_clip, targets=Targets.gae)
    config = ppo_config(settings, normalize_advantage=normalize, entropy_cost=0.03)
    found = first_loss(ppo(config, model), unrolls, model).total
    expected = slow_loss(model, unrolls, config, everything(unrolls))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_ppo_update_in_minibatches_equals_a_slow_transcription() -> None:
    """Two passes of three minibatches: Adam, clipping of gradients and the order included."""
    config = ppo_config(passes=2, minibatches=3, normalize_advantage=True, max_grad_norm=0.5, learning_rate=0.01)
    parts = learner_parts(config, tiny(), SPEC, batch_size=4, batches=1)
    unrolls, slow = unrolls_of(2, length=3), copy.deepcopy(parts.learner.model)
    parts.learner.train(unrolls)
    optimizer = torch.optim.Adam(slow.parameters(), lr=0.01, eps=1e-5)
    cells = everything(unrolls)
    for turn in range(2):
        order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(turn)).tolist()
        for part in np.array_split(order, 3):
            optimizer.zero_grad()
            slow_loss(slow, unrolls, config, [cells[number] for number in part]).backward()
            nn.utils.clip_grad_norm_(slow.parameters(), 0.5)
            optimizer.step()
    assert parts.metrics.gradient_steps == 6
    for name, expected in weights(slow).items():
        torch.testing.assert_close(weights(parts.learner.model)[name], expected, rtol=1e-3, atol=1e-5)


def test_ppo_on_vtrace_targets_of_its_own_policy_is_ppo_on_gae() -> None:
    unrolls, model = unrolls_of(3), tiny()
    with torch.no_grad():
        output, _ = model(unrolls.inputs, unrolls.core_state)
    unrolls = unrolls._replace(behavior_logits=output.logits, behavior_value=output.value)
    losses = [first_loss(ppo(ppo_config(PPOConfig(targets=targets)), model), unrolls, model) for targets in Targets]
    torch.testing.assert_close(losses[0].total, losses[1].total)
    assert losses[0].report["clipped_rho"] == losses[1].report["clipped_ratio"] == 0


def test_ppo_ratio_is_to_the_weights_before_the_update_however_old_the_unrolls_are() -> None:
    unrolls, model = unrolls_of(4), tiny()
    report = first_loss(ppo(ppo_config(PPOConfig(targets=Targets.vtrace)), model), unrolls, model).report
    assert report["kl"] == pytest.approx(0.0, abs=1e-6)
    assert report["clipped_rho"] > 0


def test_ppo_clip_follows_its_schedule() -> None:
    unrolls, model = unrolls_of(5), tiny()
    config = ppo_config(PPOConfig(clip=0.4, clip_end=0.0, targets=Targets.gae))
    at_half = first_loss(ppo(config, model), unrolls, model, fraction=0.5).total
    constant = ppo_config(PPOConfig(clip=0.2, targets=Targets.gae))
    torch.testing.assert_close(at_half, first_loss(ppo(constant, model), unrolls, model).total)


@pytest.mark.parametrize(("max_kl", "steps"), [(1e-9, 1), (1e9, 6)])
def test_ppo_ends_its_passes_once_the_policy_has_moved_far(max_kl: float, steps: int) -> None:
    settings = PPOConfig(max_kl=max_kl, targets=Targets.gae)
    config = ppo_config(settings, passes=2, minibatches=3, learning_rate=0.1)
    parts = learner_parts(config, tiny(), SPEC, batch_size=4, batches=1)
    parts.learner.train(unrolls_of(6, length=3))
    assert parts.metrics.gradient_steps == steps


def test_ppo_train_batch_that_is_not_finite_is_one_skipped_step_and_no_divergence() -> None:
    parts = learner_parts(ppo_config(passes=4, minibatches=4), tiny(), SPEC, batch_size=4, batches=1)
    unrolls, before = unrolls_of(9, length=3), weights(parts.learner.model)
    parts.learner.train(unrolls._replace(inputs=unrolls.inputs._replace(reward=unrolls.inputs.reward + math.inf)))
    assert (parts.metrics.gradient_steps, parts.metrics.skipped_updates) == (1, 1)
    assert parts.learner.skipped_in_a_row == 1
    assert not parts.learner.has_diverged
    assert same(before, weights(parts.learner.model))
    parts.learner.train(unrolls)
    assert parts.learner.skipped_in_a_row == 0


def test_ppo_on_policy_leaves_out_what_an_older_policy_did() -> None:
    unrolls, model = unrolls_of(7), tiny()
    version = np.full((6, 4), 8)
    version[0, :], version[:3, 1] = 7, 6
    unrolls = unrolls._replace(policy_version=version)
    algorithm = ppo(ppo_config(on_policy=True), model)
    batch = next(algorithm.batches(unrolls))
    ends = (unrolls.terminated | unrolls.truncated)[:-1].numpy()
    assert torch.equal(algorithm.valid(batch).view(5, 4), torch.from_numpy((version[:-1] == 8) & ~ends))


def test_ppo_measures_values_in_units_of_targets_that_change_no_value() -> None:
    model = build_model(ModelConfig(layers=[8], popart=True, normalize=False), SPEC, seed=1)
    config = ppo_config(passes=3, minibatches=2, reward_scale=1e3)
    parts = learner_parts(config, model, SPEC, batch_size=4, batches=1)
    parts.learner.train(unrolls_of(8, length=3))
    moments = parts.learner.model.value_head.moments
    assert moments.seen == 1  # once per train batch, not per gradient step
    assert moments.variance > 1e4


def test_normalized_advantage_has_mean_0_and_deviation_1_over_the_weighted() -> None:
    advantage, weight = torch.tensor([[1.0, 5.0], [3.0, 100.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    found = normalized(advantage, weight)[weight > 0]
    assert found.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert found.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


# Minibatches.


def numbered(unrolls: Unrolls) -> Rows:
    """Return rows whose `given` has the number of each transition."""
    count = unrolls.terminated[1:].numel()
    return Rows.of(unrolls, {"number": torch.arange(count).view(unrolls.terminated[1:].shape)})


@pytest.mark.parametrize("core_size", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_minibatches_of_a_pass_have_every_transition_once(count: int, core_size: int) -> None:
    unrolls = unrolls_of(0)._replace(core_state=torch.zeros(4, core_size))
    rows = numbered(unrolls)
    found = [batch.given["number"].flatten() for batch in Minibatches(2, count).of(rows)]
    assert len(found) == 2 * count
    for turn in (found[:count], found[count:]):
        assert sorted(torch.cat(turn).tolist()) == list(range(20))


def test_minibatches_for_a_model_with_memory_are_whole_unrolls() -> None:
    unrolls = unrolls_of(0)._replace(core_state=torch.arange(8.0).view(4, 2))
    for batch in Minibatches(1, 2).of(numbered(unrolls)):
        columns = batch.given["number"][0]
        assert batch.given["number"].tolist() == [(columns + 4 * t).tolist() for t in range(5)]
        assert torch.equal(batch.core_state, unrolls.core_state[columns])
        assert torch.equal(batch.inputs.observation, unrolls.inputs.observation[:-1, columns])


def test_minibatches_of_transitions_keep_what_belongs_together() -> None:
    unrolls = unrolls_of(0)
    flat = unrolls.inputs.observation[:-1].flatten(0, 1)
    for batch in Minibatches(1, 3).of(numbered(unrolls)):
        assert torch.equal(batch.inputs.observation[0], flat[batch.given["number"][0]])


@pytest.mark.parametrize("make", [numbered, lambda unrolls: unrolls], ids=["rows", "unrolls"])
def test_minibatches_of_a_resumed_run_continue_in_the_same_order(make: Callable[[Unrolls], Unrolls | Rows]) -> None:
    batch, first, resumed = make(unrolls_of(0)), Minibatches(1, 2), Minibatches(1, 2)
    orders = [[part.inputs.observation for part in first.of(batch)] for _ in range(2)]
    assert not all(torch.equal(*pair) for pair in zip(*orders, strict=True))
    resumed.load(first.tensors())
    following = [part.inputs.observation for part in first.of(batch)]
    assert all(
        torch.equal(mine, theirs.inputs.observation) for mine, theirs in zip(following, resumed.of(batch), strict=True)
    )


def test_unrolls_selected_keep_their_tickets_and_versions() -> None:
    unrolls = unrolls_of(0)
    ticket = unrolls.ticket._replace(entry=np.arange(4))
    unrolls = unrolls._replace(ticket=ticket, policy_version=np.arange(24).reshape(6, 4), weight=torch.arange(4.0))
    found = unrolls.select(torch.tensor([2, 0]))
    assert found.ticket.entry.tolist() == found.weight.tolist() == [2, 0]
    assert found.policy_version[0].tolist() == [2, 0]
    assert torch.equal(found.action, unrolls.action[:, [2, 0]])
    assert math.isclose(float(found.inputs.reward.sum()), float(unrolls.inputs.reward[:, [2, 0]].sum()), rel_tol=1e-5)
