"""What tests of several algorithms hold them against: a chain of known values, slow returns, and random unrolls.

The chain: positions 0 … END, every action moves one to the right for a reward of 1, END terminates, LIMIT steps
truncate. Episodes begin anywhere, so every position is also seen in the middle of an episode. The value of a position
is what the chain pays without the limit: V(x) = 1 + discount + … over END - x steps. Ends fall on every row of an
unroll.

from tests.oracles import VALUES, chain_rows, random_unrolls, slow_returns, to_unrolls
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seedrl.algorithms.base import Algorithm
from seedrl.types import ModelInput, Ticket, Unrolls
from tests.builders import LearnerParts, same

Array = NDArray[np.float64]
Rows = dict[str, Tensor]  # one environment after another in time, [rows]
Mistake = Callable[[Rows], Rows]

END, LIMIT, DISCOUNT = 6, 3, 0.9
VALUES = torch.tensor([(1 - DISCOUNT ** (END - x)) / (1 - DISCOUNT) for x in range(END)])
UNTRAINED = 20.0  # initial value of every position: bootstrapping from one that is never trained on shows


# The chain.


def chain_rows(count: int, seed: int = 0) -> Rows:
    """What one environment with NEXT_STEP resets sends, and the actions it is answered with."""
    random = np.random.default_rng(seed)
    position, step, ended = 0, 0, True
    rows = []
    for _ in range(count):
        if ended:  # the action on the row before is ignored
            position, step, reward = int(random.integers(END)), 0, 0.0
        else:
            position, step, reward = position + 1, step + 1, 1.0
        reset, terminated = ended, position == END
        truncated = step == LIMIT and not terminated
        ended = terminated or truncated
        rows.append((position, reward, reset, terminated, truncated, int(random.integers(2))))
    names = ("position", "reward", "reset", "terminated", "truncated", "action")
    return {name: torch.tensor(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def to_unrolls(rows: Rows, length: int = 3) -> Unrolls:
    """Cuts rows into unrolls of `length` steps; neighbours share a row, as in the store."""
    index = (torch.arange(0, len(rows["position"]) - length, length) + torch.arange(length + 1).unsqueeze(-1)).long()
    row = {name: column[index] for name, column in rows.items()}
    behavior_logits = torch.randn(*index.shape, 2, generator=torch.Generator().manual_seed(1))
    return Unrolls(
        inputs=ModelInput(
            observation=nn.functional.one_hot(row["position"], END + 1).float(),
            reward=row["reward"],
            last_action=torch.zeros_like(row["action"]),
            reset=row["reset"],
        ),
        terminated=row["terminated"],
        truncated=row["truncated"],
        action=row["action"],
        behavior_logits=behavior_logits,
        behavior_value=torch.zeros(index.shape),
        core_state=torch.zeros(index.shape[1], 0),
        weight=torch.ones(index.shape[1]),
        policy_version=np.zeros(index.shape, np.int64),
        ticket=Ticket(np.zeros(index.shape[1], np.int64), np.zeros(index.shape[1], np.int64)),
    )


def learn(
    algorithm: Algorithm,
    model: nn.Module,
    unrolls: Unrolls,
    *,
    steps: int,
    rate: float = 4.0,
    trained: nn.Module | None = None,
) -> None:
    """Train on the same unrolls again and again; `trained` are the networks that learn, if it is not the model."""
    optimizer = torch.optim.SGD((trained or model).parameters(), lr=rate)
    for _ in range(steps):
        for batch in algorithm.batches(unrolls):
            optimizer.zero_grad()
            loss = algorithm.loss(batch, model, 0.0)
            loss.total.backward()
            optimizer.step()
            algorithm.stepped(loss)


def assert_values(learned: Tensor, values: Tensor = VALUES) -> None:
    """Check a table [END + 1] that was learned on the chain."""
    torch.testing.assert_close(learned[:END], values, rtol=0, atol=1e-3)
    assert learned[END] == UNTRAINED  # a terminal observation has no transition to learn from


# Classic mistakes, each of which moves what is learned far beyond the tolerance of the tests.


def truncation_as_termination(rows: Rows) -> Rows:
    return {**rows, "terminated": rows["terminated"] | rows["truncated"], "truncated": torch.zeros_like(rows["reset"])}


def reset_observation_as_final(rows: Rows) -> Rows:
    """Environments that reset on the same step show this: the last observation of an episode is lost."""
    following = torch.cat([rows["position"][1:], rows["position"][-1:]])
    return {**rows, "position": torch.where(rows["truncated"], following, rows["position"])}


def reset_as_transition(rows: Rows) -> Rows:
    """Unmarked, the step from a final observation to the next episode is trained on like any other."""
    return {**rows, "truncated": torch.zeros_like(rows["truncated"])}


MISTAKES = (truncation_as_termination, reset_observation_as_final, reset_as_transition)


# Returns, by their definition.


def random_ends(seed: int, length: int = 9, batch: int = 7) -> dict[str, Array]:
    """Return rewards, discounts and valid rows [length, batch] of episodes that terminate or are truncated anywhere."""
    random = np.random.default_rng(seed)
    shape = (length, batch)
    valid = random.random(shape) > 0.25
    ends_next = np.concatenate([~valid[1:], random.random((1, batch)) < 0.3])
    gamma = np.where(ends_next & (random.random(shape) < 0.5), 0.0, 0.9)  # terminated, else truncated
    return {"reward": random.normal(size=shape), "gamma": gamma, "valid": valid}


def slow_return(reward: Array, gamma: Array, value: Array, valid: Array, t: int, steps: int) -> float:
    """The n-step return of one environment from row t, by walking forward."""
    total, factor, row = 0.0, 1.0, t
    while row < len(reward) and row - t < steps and valid[row]:
        total += factor * reward[row]
        factor *= gamma[row]
        row += 1
    return total + factor * value[row]


def slow_returns(case: dict[str, Array], steps: int) -> Array:
    length, batch = case["reward"].shape
    columns = [{name: array[:, b] for name, array in case.items()} for b in range(batch)]
    return np.array([[slow_return(**column, t=t, steps=steps) for column in columns] for t in range(length)])


# Unrolls and learners of any algorithm.


def random_unrolls(length: int = 5, batch: int = 4, actions: int = 3, seed: int = 0, ends: float = 0.3) -> Unrolls:
    """Episode ends on about this share of rows, the row after each a reset."""
    generator = torch.Generator().manual_seed(seed)
    shape = (length + 1, batch)
    reset = torch.rand(shape, generator=generator) < ends
    ended = torch.cat([reset[1:], torch.rand(1, batch, generator=generator) < ends])
    terminated = ended & (torch.rand(shape, generator=generator) < 0.5)
    return Unrolls(
        inputs=ModelInput(
            observation=torch.zeros(*shape, 1),
            reward=torch.randn(shape, generator=generator, dtype=torch.float64).masked_fill(reset, 0),
            last_action=torch.zeros(shape, dtype=torch.int64),
            reset=reset,
        ),
        terminated=terminated,
        truncated=ended & ~terminated,
        action=torch.randint(actions, shape, generator=generator),
        behavior_logits=torch.randn(*shape, actions, generator=generator, dtype=torch.float64),
        behavior_value=torch.randn(shape, generator=generator),
        core_state=torch.zeros(batch, 0),
        weight=torch.ones(batch),
        policy_version=np.zeros(shape, np.int64),
        ticket=Ticket(np.zeros(batch, np.int64), np.zeros(batch, np.int64)),
    )


def assert_continues_exactly(first: LearnerParts, second: LearnerParts) -> None:
    """Check that a learner that gets the tensors of another one trains on exactly as that one does."""
    first.record()
    assert first.update()
    saved = {name: tensor.clone() for name, tensor in first.learner.tensors().items()}
    second.learner.model.load_state_dict(first.learner.model.state_dict())
    second.learner.load(saved)
    for parts in (first, second):
        parts.record(seed=1)
        assert parts.update()
    assert same(first.learner.tensors(), second.learner.tensors())
