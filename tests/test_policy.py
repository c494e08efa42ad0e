"""Publishing and reading weights, also at the same time. Threads meet at events; nothing sleeps."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seedrl.policy import Policy

PATIENCE = 20.0  # seconds until something that should happen counts as blocked
SHORT = 0.1  # seconds something that must not happen is given to happen


class Weights(nn.Module):
    """One weight and one integer buffer, both of one value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(value)))
        self.register_buffer("count", torch.tensor(value))


class SlowToCopy(Weights):
    """Its state comes when `finish` is set; until then whoever publishes it is in the middle of publishing."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.begun = threading.Event()
        self.finish = threading.Event()

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
        self.begun.set()
        assert self.finish.wait(PATIENCE)
        return super().state_dict(*arguments, **keywords)


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield executor


def values_of(model: nn.Module) -> set[float]:
    return {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}


def read_once(policy: Policy) -> tuple[set[float], int]:
    with policy.read() as (model, version):
        return values_of(model), version


def test_policy_new_serves_its_model_and_version() -> None:
    policy = Policy(Weights(7), version=3)
    assert policy.version == 3
    assert read_once(policy) == ({7}, 3)


def test_policy_published_weights_and_buffers_are_read_with_their_version() -> None:
    policy = Policy(Weights(0), version=0)
    for version in (1, 2, 3, 4):
        policy.publish(Weights(10 * version), version)
        assert policy.version == version
        assert read_once(policy) == ({10 * version}, version)


def test_policy_trained_model_changes_nothing_before_it_is_published() -> None:
    model = Weights(0)
    policy = Policy(model, version=0)
    policy.publish(model, version=1)
    with torch.no_grad():
        model.weight.fill_(5)
    assert read_once(policy) == ({0}, 1)


def test_policy_publish_copies_in_place_between_two_replicas() -> None:
    """On the device: no new storage is allocated, and none is shared with the model that is trained."""
    model = Weights(0)
    policy = Policy(model, version=0)

    def storage() -> tuple[int, ...]:
        with policy.read() as (replica, _):
            return tuple(tensor.data_ptr() for tensor in replica.state_dict().values())

    seen = [storage()]
    for version in range(1, 5):
        policy.publish(model, version)
        seen.append(storage())
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3]
    assert len({model.weight.data_ptr(), seen[0][0], seen[1][0]}) == 3


def test_policy_replicas_need_no_gradient() -> None:
    with Policy(Weights(0), version=0).read() as (model, _):
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_policy_reader_is_not_blocked_while_a_publish_copies(others: ThreadPoolExecutor) -> None:
    policy, slow = Policy(Weights(0), version=0), SlowToCopy(1)
    publishing = others.submit(policy.publish, slow, 1)
    try:
        assert slow.begun.wait(PATIENCE)
        assert others.submit(read_once, policy).result(PATIENCE) == ({0}, 0)
        assert others.submit(read_once, policy).result(PATIENCE) == ({0}, 0)
        assert policy.version == 0
    finally:
        slow.finish.set()
    publishing.result(PATIENCE)
    assert read_once(policy) == ({1}, 1)


def test_policy_publisher_is_not_blocked_by_a_reader_of_the_current_weights(others: ThreadPoolExecutor) -> None:
    policy = Policy(Weights(0), version=0)
    with policy.read() as (model, version):
        others.submit(policy.publish, Weights(1), 1).result(PATIENCE)
        assert policy.version == 1
        assert (values_of(model), version) == ({0}, 0)


def test_policy_second_publish_waits_for_the_reader_of_the_weights_it_replaces(others: ThreadPoolExecutor) -> None:
    policy = Policy(Weights(0), version=0)
    with policy.read() as (model, _):
        policy.publish(Weights(1), 1)
        second = others.submit(policy.publish, Weights(2), 2)
        with pytest.raises(TimeoutError):
            second.result(SHORT)
        assert values_of(model) == {0}
        assert policy.version == 1
    second.result(PATIENCE)
    assert read_once(policy) == ({2}, 2)


def test_policy_read_that_raises_lets_the_next_publishes_through(others: ThreadPoolExecutor) -> None:
    policy = Policy(Weights(0), version=0)
    with pytest.raises(RuntimeError, match="forward failed"), policy.read():
        raise RuntimeError("forward failed")
    for version in (1, 2):
        others.submit(policy.publish, Weights(version), version).result(PATIENCE)
    assert read_once(policy) == ({2}, 2)


def test_policy_reads_among_publishes_never_see_mixed_or_older_weights(others: ThreadPoolExecutor) -> None:
    policy = Policy(Weights(0), version=0)

    def publish_all() -> None:
        for version in range(1, 301):
            policy.publish(Weights(version), version)

    publishing = others.submit(publish_all)
    seen = []
    while not publishing.done():
        values, version = read_once(policy)
        assert values == {version}
        seen.append(version)
    publishing.result(PATIENCE)
    assert seen == sorted(seen)
    assert read_once(policy) == ({300}, 300)


def test_policy_wait_for_current_or_older_version_returns_at_once() -> None:
    policy = Policy(Weights(0), version=5)
    assert policy.wait_for(5, timeout=0)
    assert policy.wait_for(4, timeout=0)


def test_policy_wait_for_later_version_gives_up_at_the_timeout() -> None:
    assert not Policy(Weights(0), version=5).wait_for(6, timeout=0)


def test_policy_wait_for_later_version_ends_when_it_is_published(others: ThreadPoolExecutor) -> None:
    policy = Policy(Weights(0), version=0)
    waiting = others.submit(policy.wait_for, 2, 10 * PATIENCE)
    policy.publish(Weights(1), 1)
    with pytest.raises(TimeoutError):
        waiting.result(SHORT)
    policy.publish(Weights(2), 2)
    assert waiting.result(PATIENCE)
