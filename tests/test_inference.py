"""What the policy saw, answered and recorded: invariants 2 (one upload), 3 (replay), 4 (own answers) and 6 (resets)."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from envs_server.pool import EnvPool
from seedrl.actions import Actions
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.transitions import transitions
from seedrl.config import ModelConfig
from seedrl.models.build import build_model
from seedrl.rows import RESET, TERMINATED, TRUNCATED, Rows
from seedrl.serving.staging import Noise
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from tests.fakes import FakePool, make_job, make_spec
from tests.rig import Rig, make_model, make_rows, stacked


class NoisyPool(FakePool):
    """Counting environments seen through noise, so that no two observations are alike."""

    def recv(self) -> Rows:
        rows = super().recv()
        noise = np.random.default_rng(int(self._row.sum())).integers(0, 255, rows.observation.shape)
        scale = 1 if rows.observation.dtype.kind == "u" else 1 / 255
        return rows._replace(observation=(noise * scale).astype(rows.observation.dtype))


class Telling(nn.Module):
    """A policy whose action is the first entry of the observation."""

    core_size = 0

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.weight = nn.Parameter(torch.tensor(1e4))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        told = inputs.observation[..., 0].long()
        logits = self.weight * nn.functional.one_hot(told, self.num_actions)
        return ModelOutput(logits, inputs.reward), core_state


def watch_observations(rig: Rig) -> list[Tensor]:
    """Every stacked observation the current policy is given from now on."""
    seen: list[Tensor] = []
    with rig.policy.read() as (model, _):
        model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].observation[0].clone()))
    return seen


# Frame stacks.


def test_stack_real_pong_equals_envpools_own_byte_for_byte() -> None:
    envs, steps, unroll_length = 3, 350, 7

    def make_pool(stack_num: int) -> EnvPool:
        options = {"stack_num": stack_num, "max_episode_steps": 45, "noop_max": 4}
        return EnvPool(make_job(envs, env_id="Pong-v5", options=options), threads=1)

    newest_only, reference = make_pool(stack_num=1), make_pool(stack_num=4)
    rig = Rig(newest_only.spec, slots=envs, capacity=2 * envs, unroll_length=unroll_length, frame_stack=4)
    assert stacked(newest_only.spec, 4) == reference.spec
    session, seen = rig.join(range(envs)), watch_observations(rig)
    expected: list[np.ndarray] = []  # since the last finished unroll
    resets = 0
    for _ in range(steps):
        rows, own = newest_only.recv(), reference.recv()
        (action,) = rig.run(rig.request(session, rows))
        np.testing.assert_array_equal(rows.flags, own.flags)
        np.testing.assert_array_equal(seen[-1].numpy(), own.observation)
        expected.append(own.observation)
        resets += np.count_nonzero(rows.flags & RESET)
        if rig.store.ready:
            unrolls = rig.store.take(envs, timeout=0)
            assert unrolls is not None
            np.testing.assert_array_equal(unrolls.inputs.observation.numpy(), np.stack(expected))
            del expected[:-1]
        newest_only.send(action, rows.env_id)
        reference.send(action, own.env_id)
    assert rig.selector.added == envs * ((steps - 1) // unroll_length)
    assert resets > 20


# Replay.


@torch.no_grad()
def replay_rows(unrolls: Unrolls, models: dict[int, nn.Module]) -> ModelOutput:
    """Row after row as inference did it, each with the weights of its version."""
    outputs, core_state = [], unrolls.core_state
    for t, version in enumerate(unrolls.policy_version):
        model = models[int(version[0])]
        row = ModelInput(*(column[t : t + 1] for column in unrolls.inputs))
        output, core_state = model(row, core_state)
        outputs.append(output)
    return ModelOutput(torch.cat([each.logits for each in outputs]), torch.cat([each.value for each in outputs]))


@torch.no_grad()
def replay_at_once(unrolls: Unrolls, model: nn.Module) -> ModelOutput:
    """All rows in one call, as training does it."""
    output, _ = model(unrolls.inputs, unrolls.core_state)
    return output


VECTORS: dict[str, Any] = {"shape": (4,)}
IMAGES: dict[str, Any] = {"shape": (1, 84, 84), "dtype": "uint8"}
NETWORKS = pytest.mark.parametrize(
    ("config", "observations", "frame_stack", "envs"),
    [
        pytest.param(ModelConfig(name="mlp"), VECTORS, 1, 3, id="mlp"),
        pytest.param(ModelConfig(name="mlp"), VECTORS, 1, 1, id="mlp-one-env"),
        pytest.param(ModelConfig(name="mlp", lstm=8), VECTORS, 1, 3, id="mlp-lstm"),
        pytest.param(ModelConfig(name="nature"), IMAGES, 4, 2, id="nature-stack"),
        pytest.param(ModelConfig(name="nature", lstm=8), IMAGES, 4, 2, id="nature-stack-lstm"),
    ],
)


def make_network(config: ModelConfig, spec: EnvSpec, seed: int = 3) -> nn.Module:
    model = build_model(config, spec, seed)
    with torch.no_grad():  # heads of gain 0.01 would hide differences
        model.policy_head.weight.mul_(100)
    return model


@NETWORKS
def test_replay_recorded_unrolls_reproduces_logits_and_values(
    config: ModelConfig, observations: dict[str, Any], frame_stack: int, envs: int
) -> None:
    pool = NoisyPool(make_job(envs), episode_length=5, **observations)
    model = make_network(config, stacked(pool.spec, frame_stack))
    rig = Rig(pool.spec, model, slots=envs, unroll_length=4, frame_stack=frame_stack)
    rig.play(rig.join(range(envs)), pool, steps=4 * 6 + 1)
    ends = 0
    for _ in range(6):
        unrolls = rig.store.take(envs, timeout=0)
        assert unrolls is not None
        ends += int(unrolls.terminated.sum())
        by_rows = replay_rows(unrolls, {0: model})
        assert torch.equal(by_rows.logits, unrolls.behavior_logits)
        assert torch.equal(by_rows.value, unrolls.behavior_value)
        at_once = replay_at_once(unrolls, model)
        torch.testing.assert_close(at_once.logits, unrolls.behavior_logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(at_once.value, unrolls.behavior_value, rtol=1e-5, atol=1e-5)
        assert unrolls.behavior_logits.std() > 0.01  # there is something to reproduce
    assert ends >= 3 * envs


@NETWORKS
def test_replay_policy_published_in_mid_unroll_reproduces_each_row_with_its_version(
    config: ModelConfig, observations: dict[str, Any], frame_stack: int, envs: int
) -> None:
    pool = NoisyPool(make_job(envs), episode_length=5, **observations)
    spec = stacked(pool.spec, frame_stack)
    models = {version: make_network(config, spec, seed=version) for version in range(4)}
    rig = Rig(pool.spec, models[0], slots=envs, unroll_length=4, frame_stack=frame_stack)
    session = rig.join(range(envs))
    expected = []
    for version in range(4):
        if version:
            rig.policy.publish(models[version], version)
        rig.play(session, pool, steps=3)
        expected += [version] * 3
    for first in (0, 4):
        unrolls = rig.store.take(envs, timeout=0)
        assert unrolls is not None
        assert unrolls.policy_version.tolist() == [[version] * envs for version in expected[first : first + 5]]
        replayed = replay_rows(unrolls, models)
        assert torch.equal(replayed.logits, unrolls.behavior_logits)
        assert torch.equal(replayed.value, unrolls.behavior_value)
        wrong = replay_rows(unrolls, dict.fromkeys(models, models[0]))
        assert not torch.allclose(wrong.logits, unrolls.behavior_logits)


def test_replay_groups_served_in_turn_reproduces_each_slot() -> None:
    """The core_state of a slot is its own, however batches are composed."""
    pool = NoisyPool(make_job(num_envs=4, group_size=2), episode_length=5)
    model = make_model(pool.spec, core_size=3)
    rig = Rig(pool.spec, model, slots=4, unroll_length=4)
    rig.play(rig.join([3, 0, 1, 2]), pool, steps=2 * 13)
    unrolls = rig.store.take(12, timeout=0)
    assert unrolls is not None
    replayed = replay_at_once(unrolls, model)
    torch.testing.assert_close(replayed.logits, unrolls.behavior_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(replayed.value, unrolls.behavior_value, rtol=1e-5, atol=1e-5)


# Sessions.


def test_release_discards_partial_unrolls_at_once_and_those_of_others_stay() -> None:
    """A1."""
    pools = [FakePool(make_job(2), episode_length=100) for _ in range(2)]
    rig = Rig(pools[0].spec, slots=4, unroll_length=4)
    dead, alive = rig.join([0, 1]), rig.join([2, 3])
    rig.play(dead, pools[0], steps=3)
    rig.play(alive, pools[1], steps=3)
    rig.inference.release(dead)
    assert rig.metrics.rows_dropped["partial_unroll"] == 6
    assert rig.metrics.unrolls_dropped["session_ended"] == 2
    rig.play(rig.join([0, 1]), FakePool(make_job(2)), steps=1)
    assert rig.metrics.rows_dropped["partial_unroll"] == 6  # not once more when the slots are leased again
    rig.play(alive, pools[1], steps=2)
    assert rig.store.ready == 2


def test_release_of_a_session_whose_unrolls_wait_for_room_discards_those_too() -> None:
    """A1: what was not handed over goes with its session, and what remains is handed over."""
    pools = [FakePool(make_job(2)) for _ in range(2)]
    rig = Rig(pools[0].spec, make_model(pools[0].spec, core_size=2), slots=4, capacity=1, unroll_length=1)
    dead, alive = rig.join([0, 1]), rig.join([2, 3])
    rig.inference.run([rig.request(dead, pools[0].recv()), rig.request(alive, pools[1].recv())])
    for pool in pools:
        pool.send(np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    rig.inference.run([rig.request(dead, pools[0].recv()), rig.request(alive, pools[1].recv())])
    assert not rig.inference.finish_unrolls()  # room for one of four
    rig.inference.release(dead)
    assert not rig.inference.finish_unrolls()
    for _ in range(2):
        assert rig.store.take(1, timeout=0) is not None
        rig.inference.finish_unrolls()
    assert rig.inference.finish_unrolls()
    assert rig.selector.added == 3
    assert rig.metrics.unrolls_dropped["session_ended"] == 2  # one that waited, one that had just begun


def test_run_new_session_on_same_slots_starts_afresh() -> None:
    """Three rows of an old session are in the unroll when another takes over: nothing of them remains."""
    pool = FakePool(make_job(2), episode_length=100)
    model = make_model(stacked(pool.spec, 3), core_size=2)
    rig = Rig(pool.spec, model, slots=2, unroll_length=4, frame_stack=3)
    old = rig.join([0, 1])
    rig.play(old, pool, steps=3)
    old.alive = False
    before = rig.slots.core_state(torch.from_numpy(old.lease.slots))
    fresh = FakePool(make_job(2), episode_length=100)
    rig.play(rig.join([0, 1]), fresh, steps=5)

    unrolls = rig.store.take(2, timeout=0)
    assert unrolls is not None
    assert rig.metrics.rows_dropped["partial_unroll"] == 6
    assert unrolls.inputs.reset[:, 0].tolist() == [True, False, False, False, False]
    assert unrolls.inputs.last_action[0].tolist() == [0, 0]
    assert torch.equal(unrolls.core_state, before)  # the model, not the store, forgets it at the reset row
    steps = unrolls.inputs.observation.view(5, 2, 3, 2)[..., 1]
    assert steps[:, 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]

    alone = Rig(pool.spec, copy.deepcopy(model), slots=2, unroll_length=4, frame_stack=3)
    alone.play(alone.join([0, 1]), FakePool(make_job(2), episode_length=100), steps=5)
    untouched = alone.store.take(2, timeout=0)
    assert untouched is not None
    torch.testing.assert_close(unrolls.behavior_value, untouched.behavior_value)


@pytest.mark.parametrize("lstm", [True, False])
def test_run_slot_with_nan_core_state_is_healed_by_reset(lstm: bool) -> None:
    """Finite observations may overflow on their way to the core; what that leaves behind must end with the episode."""
    spec = make_spec()
    model = build_model(ModelConfig(name="mlp", lstm=4), spec, seed=0) if lstm else make_model(spec, core_size=4)
    rig = Rig(spec, model, slots=1)
    session = rig.join([0])
    rig.slots._core_state.fill_(torch.nan)
    rig.run(rig.request(session, make_rows(np.zeros((1, 2), np.float32), RESET)))
    assert rig.slots._core_state[:-1].isfinite().all()


def test_run_episode_counts_follow_raw_rewards() -> None:
    pool = FakePool(make_job(2), episode_length=5, ending=TRUNCATED)
    rig = Rig(pool.spec, slots=2)
    rig.play(rig.join([0, 1]), pool, steps=2 * 6 + 1)
    assert rig.metrics.episodes == 4
    assert list(rig.metrics.returns) == [5.0] * 4
    assert list(rig.metrics.lengths) == [5] * 4
    assert rig.metrics.rows == 2 * 13
    assert rig.metrics.env_steps == 2 * 10  # three reset rows each are no steps


def test_run_flags_are_recorded_where_they_came() -> None:
    rig = Rig(make_spec(), slots=1, unroll_length=4)
    session = rig.join([0])
    for flags in (RESET, TERMINATED, RESET, TRUNCATED, RESET):
        rig.run(rig.request(session, make_rows(np.zeros((1, 2), np.float32), flags)))
    unrolls = rig.store.take(1, timeout=0)
    assert unrolls is not None
    assert unrolls.inputs.reset[:, 0].tolist() == [True, False, True, False, True]
    assert unrolls.terminated[:, 0].tolist() == [False, True, False, False, False]
    assert unrolls.truncated[:, 0].tolist() == [False, False, False, True, False]


def test_run_row_with_both_ends_is_trained_on_as_terminated() -> None:
    """The proto says so: nothing is bootstrapped from the value of its observation, and the next row has RESET."""
    rig = Rig(make_spec(), slots=1, unroll_length=4)
    session = rig.join([0])
    for flags in (RESET, TERMINATED | TRUNCATED, RESET, TRUNCATED, RESET):
        rig.run(rig.request(session, make_rows(np.zeros((1, 2), np.float32), flags)))
    unrolls = rig.store.take(1, timeout=0)
    assert unrolls is not None
    step = transitions(unrolls, AlgorithmConfig())
    discount = AlgorithmConfig().discount
    assert step.discount_tp1[:, 0].tolist() == pytest.approx([0.0, discount, discount, discount])
    assert step.valid_t[:, 0].tolist() == [True, False, True, False]
    assert rig.metrics.episodes == 2


# Answers.


def test_run_mixed_requests_get_exactly_their_own_actions() -> None:
    actions = 50
    rig = Rig(make_spec(num_actions=actions), Telling(actions), slots=16)
    sessions = [rig.join(range(0, 8)), rig.join(range(8, 16))]
    generator = np.random.default_rng(0)
    flags: Any = RESET
    for sizes in ([1], [3, 5], [2, 1, 4, 1], [8, 8]):
        expected, requests, free = [], [], [list(range(8)), list(range(8))]
        for index, size in enumerate(sizes):
            own = free[index % 2]
            env_id = generator.permutation(own)[:size]
            free[index % 2] = sorted(set(own) - set(env_id.tolist()))
            told = generator.integers(0, actions, size)
            observation = np.stack([told, env_id], axis=1).astype(np.float32)
            requests.append(rig.request(sessions[index % 2], make_rows(observation, flags, env_id.tolist())))
            expected.append(told.tolist())
        answered = rig.run(*requests)
        assert [request for request, _ in rig.answers] == requests
        assert [action.tolist() for action in answered] == expected


def test_run_same_seed_gives_same_actions() -> None:
    model = make_model(make_spec(num_actions=5))

    def actions(seed: int) -> list[list[int]]:
        pool = FakePool(make_job(4), num_actions=5)
        rig = Rig(pool.spec, model, seed=seed)
        rig.play(rig.join(range(4)), pool, steps=20)
        return [action.tolist() for _, action in pool.sent]

    first, again, other = actions(seed=1), actions(seed=1), actions(seed=2)
    assert first == again
    assert first != other


def draw(logits: torch.Tensor) -> torch.Tensor:
    actions = Actions(make_spec(num_actions=logits.shape[1]))
    return actions.choose(logits, Noise(actions, torch.Generator().manual_seed(0)).draw(len(logits)))


def test_noise_is_never_used_twice_and_the_same_for_the_same_seed() -> None:
    def drawn(sizes: list[int]) -> torch.Tensor:
        noise = Noise(Actions(make_spec()), torch.Generator().manual_seed(1), stock=8)
        return torch.cat([noise.draw(size) for size in sizes])

    numbers = drawn([3, 5, 8, 20, 1])
    assert len(numbers.unique()) == numbers.numel()
    assert torch.equal(numbers, drawn([3, 5, 8, 20, 1]))


def test_sample_frequencies_match_softmax() -> None:
    draws = 40_000
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, -1.0])
    action = draw(logits.expand(draws, -1))
    expected = logits.softmax(dim=-1) * draws
    seen = torch.bincount(action, minlength=5)
    assert float(((seen - expected) ** 2 / expected).sum()) < 18.5  # chi-square, 4 degrees of freedom: p = 0.001


def test_sample_rows_are_independent() -> None:
    logits = torch.zeros(20_000, 2)
    action = draw(logits).float()
    correlation = torch.corrcoef(torch.stack([action[:-1], action[1:]]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_sample_extreme_logits_never_picks_the_impossible() -> None:
    logits = torch.tensor([[-1e4, 0.0, -float("inf")]]).expand(10_000, -1)
    assert draw(logits).unique().tolist() == [1]


# Uploads and back-pressure.


def test_run_observation_is_moved_once_and_trained_on_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = NoisyPool(make_job(2), shape=(1, 8, 8), dtype="uint8")
    rig = Rig(pool.spec, slots=2, unroll_length=4, frame_stack=4)
    written: list[np.ndarray] = []
    write = rig.store.columns.write_frames
    monkeypatch.setattr(
        rig.store.columns, "write_frames", lambda frame, rows: (written.append(rows), write(frame, rows))
    )
    history = rig.play(rig.join([0, 1]), pool, steps=5)
    assert all(array is rows.observation for array, rows in zip(written, history, strict=True))
    rig.store.columns._frames.words.view(torch.uint8).fill_(77)  # training has no other source
    unrolls = rig.store.take(2, timeout=0)
    assert unrolls is not None
    assert unrolls.inputs.observation.unique().tolist() == [77]


def test_finish_unrolls_full_store_goes_on_as_the_learner_takes() -> None:
    pool = FakePool(make_job(2))
    rig = Rig(pool.spec, slots=2, capacity=2, unroll_length=1)
    session = rig.join([0, 1])
    rig.play(session, pool, steps=2)
    assert rig.store.ready == rig.store.capacity

    rig.answers.clear()
    rig.inference.run([rig.request(session, pool.recv())])
    assert [len(action) for _, action in rig.answers] == [2]  # whoever waits is answered first
    assert not rig.inference.finish_unrolls()
    assert rig.selector.added == 2
    assert rig.store.take(1, timeout=0) is not None
    assert not rig.inference.finish_unrolls()  # there was room for one of two
    assert rig.selector.added == 3
    assert rig.store.take(2, timeout=0) is not None
    assert rig.inference.finish_unrolls()
    assert rig.selector.added == 4


# Exploration.


def test_run_session_that_explores_is_recorded_with_what_its_actions_were_drawn_from() -> None:
    """V-trace divides by the probability of acting so: it has to be that of the temperature and epsilon then."""
    pools = [FakePool(make_job(2)) for _ in range(2)]
    rig = Rig(pools[0].spec, slots=4, unroll_length=4)
    plain, hot = rig.join([0, 1]), rig.join([2, 3])
    rig.seats.explore(hot.lease.slots, temperature=3.0, epsilon=0.25)
    for _ in range(5):
        rows = [pool.recv() for pool in pools]
        actions = rig.run(rig.request(plain, rows[0]), rig.request(hot, rows[1]))
        for pool, row, action in zip(pools, rows, actions, strict=True):
            pool.send(action, row.env_id)
    unrolls = rig.store.take(4, timeout=0)
    assert unrolls is not None
    policy = replay_at_once(unrolls, rig.model).logits
    torch.testing.assert_close(unrolls.behavior_logits[:, :2], policy[:, :2])
    drawn = unrolls.behavior_logits[:, 2:].softmax(-1)
    torch.testing.assert_close(drawn, 0.75 * (policy[:, 2:] / 3).softmax(-1) + 0.25 / 3)


def test_run_session_that_explores_draws_with_those_probabilities() -> None:
    model = Telling(num_actions=3)  # certain of itself
    rig = Rig(make_spec(), model, slots=1000)
    session = rig.join(range(1000))
    rig.seats.explore(session.lease.slots, temperature=None, epsilon=0.6)
    (action,) = rig.run(rig.request(session, make_rows(np.ones((1000, 2), np.float32))))
    shares = np.bincount(action, minlength=3) / 1000
    np.testing.assert_allclose(shares, [0.2, 0.6, 0.2], atol=0.05)
