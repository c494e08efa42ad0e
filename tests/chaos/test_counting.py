"""Counting environments and the model that checks their unrolls see what is wrong, each kind of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs_server.mock import MockPool
from envs_server.pool import make_pool
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED
from seedrl.types import ModelInput
from tests.chaos.counting import (
    AGE,
    BEHIND,
    ENV,
    FLAGS,
    NONCE,
    NUM_ACTIONS,
    SIGNATURE,
    STEP,
    WRAPPER,
    CountingPool,
    mock_options,
    right_action,
)
from tests.chaos.model import CountingModel, UnrollCheck
from tests.fakes import make_job
from tests.rig import Rig


def counting_job(num_envs: int = 4, group_size: int = 2, **options: Any) -> Any:
    return make_job(num_envs, group_size, env_id="counting", options=options)


def right(rows: Any) -> Any:
    return right_action(rows.observation.astype(np.int64)).astype(np.int32)


def play(pool: CountingPool, requests: int) -> list[Any]:
    history = []
    for _ in range(requests):
        history.append(rows := pool.recv())
        pool.send(right(rows), rows.env_id)
    return history


def test_mock_environments_become_counting_ones_by_a_wrapper() -> None:
    job = make_job(4, 2, env_id="mock", options=mock_options(size=12, longest=3), wrappers=[WRAPPER])
    pool = make_pool(job, threads=1)
    assert isinstance(pool, CountingPool)
    assert pool.recv().observation.shape == (2, 12)
    assert pool.spec == MockPool(job).spec


def test_pool_with_other_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="counting takes size"):
        CountingPool(counting_job(shape=[3]))
    with pytest.raises(ConfigError, match="counting takes size"):
        CountingPool(counting_job(size=SIGNATURE - 1))


def test_recv_rows_count_per_environment_and_end_both_ways_at_many_lengths() -> None:
    history = play(CountingPool(counting_job(num_envs=2, group_size=2, longest=9)), requests=400)
    rows = np.stack([each.observation for each in history])  # [400, 2, SIGNATURE]
    assert (rows[..., STEP] == np.arange(400)[:, None]).all()
    assert (rows[..., ENV] == [0, 1]).all()
    assert len(np.unique(rows[..., NONCE])) == 1
    flags = rows[..., FLAGS]
    assert (flags[0] == RESET).all()
    assert ((flags[1:] == RESET) == ((flags[:-1] & ENDED) != 0)).all()
    assert {TERMINATED, TRUNCATED} <= set(np.unique(flags))
    assert set(rows[..., AGE][(flags & ENDED) != 0]) == set(range(1, 10))


def test_pools_of_one_job_have_nonces_of_their_own() -> None:
    assert len({int(CountingPool(counting_job()).recv().observation[0, NONCE]) for _ in range(8)}) == 8


def test_recv_of_larger_rows_repeats_the_signature_to_the_end() -> None:
    observation = CountingPool(counting_job(size=12)).recv().observation
    np.testing.assert_array_equal(observation[:, SIGNATURE : 2 * SIGNATURE], observation[:, :SIGNATURE])
    np.testing.assert_array_equal(observation[:, 10:], observation[:, :2])


def test_send_of_a_wrong_action_names_it() -> None:
    pool = CountingPool(counting_job())
    rows = pool.recv()
    action = right(rows)
    action[1] = (action[1] + 1) % NUM_ACTIONS
    with pytest.raises(ValueError, match=f"a wrong action: step 0 of environment 1, .* got {action[1]}"):
        pool.send(action, rows.env_id)


def test_send_of_a_doubled_action_names_it() -> None:
    pool = CountingPool(counting_job())
    rows = pool.recv()
    pool.send(right(rows), rows.env_id)
    with pytest.raises(ValueError, match="a doubled action: step 0 of environment 0"):
        pool.send(right(rows), rows.env_id)


def test_send_of_too_few_actions_says_so() -> None:
    pool = CountingPool(counting_job())
    rows = pool.recv()
    with pytest.raises(ValueError, match="missing actions: 2 environments got 1"):
        pool.send(right(rows)[:1], rows.env_id)


def test_send_without_an_action_for_one_group_is_noticed() -> None:
    pool = CountingPool(counting_job())
    pool.recv()  # and no answer to it
    with pytest.raises(ValueError, match="a missing action: step 0 of environment 0"):
        play(pool, requests=BEHIND + 2)


# The model: unrolls as inference records them, and what a fault in it would make of them.


def recorded(tmp_path: Path, train_batches: int = 1, **options: Any) -> list[ModelInput]:
    """Train batches of 4 unrolls of 8 steps each, recorded by the real inference and store."""
    pool = CountingPool(counting_job(longest=5, **options))
    rig = Rig(pool.spec, CountingModel(pool.spec, str(tmp_path / "violations")), unroll_length=8)
    rig.play(rig.join([2, 0, 3, 1]), pool, steps=2 * (8 * train_batches + 1))
    taken = [rig.store.take(4, timeout=0) for _ in range(train_batches)]
    assert all(unrolls is not None for unrolls in taken)
    return [unrolls.inputs for unrolls in taken if unrolls is not None]


@pytest.mark.parametrize("size", [SIGNATURE, 64])
def test_check_of_what_inference_records_finds_nothing(tmp_path: Path, size: int) -> None:
    check = UnrollCheck()
    for inputs in recorded(tmp_path, train_batches=3, size=size):
        assert check.violations(inputs) == []


def spliced(inputs: ModelInput, column: int, t: int = 4) -> ModelInput:
    observation = inputs.observation.clone()
    observation[t:, 1, column] += 1
    return inputs._replace(observation=observation)


def with_change(inputs: ModelInput, field: str, value: Any) -> ModelInput:
    tensor = getattr(inputs, field).clone()
    tensor[3, 2] = value(tensor[3, 2])
    return inputs._replace(**{field: tensor})


WRONGS: dict[str, Callable[[ModelInput], ModelInput]] = {
    "two sessions": lambda inputs: spliced(inputs, NONCE),
    "two environments": lambda inputs: spliced(inputs, ENV),
    "gap or repeat": lambda inputs: spliced(inputs, STEP),
    "torn observation": lambda inputs: inputs._replace(
        observation=torch.cat([inputs.observation, inputs.observation.roll(1, dims=0)], dim=-1)
    ),
    "reset out of place": lambda inputs: with_change(inputs, "reset", torch.logical_not),
    "action of another row": lambda inputs: with_change(inputs, "last_action", lambda action: action + 1),
    "reward of another row": lambda inputs: with_change(inputs, "reward", lambda reward: 1 - reward),
    "unroll out of order": lambda inputs: ModelInput(*(tensor[1:] for tensor in inputs)),
}


@pytest.mark.parametrize("what", WRONGS)
def test_check_of_a_damaged_unroll_names_the_damage(tmp_path: Path, what: str) -> None:
    (inputs,) = recorded(tmp_path)
    assert what in {words.partition(":")[0] for words in UnrollCheck().violations(WRONGS[what](inputs))}


def test_check_of_an_unroll_trained_on_twice_or_left_out_says_so(tmp_path: Path) -> None:
    first, second, third = recorded(tmp_path, train_batches=3)
    check = UnrollCheck()
    assert check.violations(first) == []
    assert len(check.violations(first)) == 4
    assert check.violations(second) == []
    check.violations(third)
    assert any("expected step 24" in words for words in check.violations(second))


def test_model_in_training_writes_violations_down_and_goes_on(tmp_path: Path) -> None:
    (inputs,) = recorded(tmp_path)
    model = CountingModel(CountingPool(counting_job()).spec, str(tmp_path / "violations"))
    model(inputs, torch.zeros(4, 0))
    assert not (tmp_path / "violations").exists()
    output, _ = model(spliced(inputs, NONCE), torch.zeros(4, 0))
    assert output.value.requires_grad
    assert "two sessions" in (tmp_path / "violations").read_text()
