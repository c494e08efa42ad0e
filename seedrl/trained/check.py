"""Compares two policies: inputs worth trying, and how far apart the outputs are. Knows nothing of file formats."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from seedrl.errors import SeedrlError
from seedrl.specs import ArraySpec, EnvSpec, names
from seedrl.trained.step import StepInputs, StepOutputs, StepPolicy, flat
from seedrl.types import Observation

TOLERANCE = 1e-4  # relative to values above 1, absolute below: sums in another order differ by less
SIZES = (1, 2, 7)  # batch sizes
STEPS = 8  # consecutive steps in which each policy keeps its own core_state

Step = Callable[[StepInputs], StepOutputs]


def largest_difference(policy: StepPolicy, other: Step) -> float:
    """Return the largest difference between two policies' outputs for the same inputs.

    Raises an error if an action of `other` is not the most likely one within its bounds.
    """
    largest = 0.0
    for inputs in tried(policy):
        ours, theirs = policy.step(inputs), other(inputs)
        largest = max(largest, *map(_difference, ours[1:4], theirs[1:4]))
        _check_action(policy, theirs)
    return max(largest, _drift(policy, other))


def tried(policy: StepPolicy) -> Iterator[StepInputs]:
    """Yield ordinary inputs in batches of several sizes, then rare ones: all rows reset, large values, zeros."""
    for seed, rows in enumerate(SIZES):
        yield random_inputs(policy, rows, seed)
    ordinary = random_inputs(policy, SIZES[-1], len(SIZES))
    everywhere = torch.ones_like(ordinary.reset)
    yield ordinary._replace(reset=everywhere, core_state=torch.full_like(ordinary.core_state, math.nan))
    yield ordinary._replace(reset=~everywhere)
    spec = policy.spec
    yield ordinary._replace(observation=_like(spec, ordinary.observation, _smallest), reward=ordinary.reward * 1e3)
    yield ordinary._replace(observation=_like(spec, ordinary.observation, _largest), reward=ordinary.reward * -1e3)


def random_inputs(policy: StepPolicy, rows: int, seed: int) -> StepInputs:
    """Draw inputs from the policy's spaces; some rows begin an episode. A mask allows at least one choice."""
    spec, generator = policy.spec, torch.Generator().manual_seed(seed)
    reset = torch.rand(rows, generator=generator) < 0.3
    chosen = policy.actions.choose(
        torch.randn(rows, spec.policy_size, generator=generator), policy.actions.noise(rows, generator)
    )
    begins = reset.view(-1, *[1] * (chosen.dim() - 1))
    return StepInputs(
        observation=_like(spec, None, lambda leaf, is_mask: _random(leaf, is_mask, rows, generator)),
        reward=torch.randn(rows, generator=generator).masked_fill(reset, 0),
        last_action=chosen.masked_fill(begins, 0),
        reset=reset,
        core_state=torch.randn(rows, policy.core_size, generator=generator),
    )


def _drift(policy: StepPolicy, other: Step) -> float:
    """Return the difference after some steps in which each policy keeps its own core_state."""
    ours = theirs = random_inputs(policy, SIZES[-1], seed=100)
    for number in range(STEPS):
        our_outputs, their_outputs = policy.step(ours), other(theirs)
        # Both continue with our actions: where two are equally likely, either may be chosen.
        after = random_inputs(policy, SIZES[-1], seed=101 + number)._replace(
            last_action=our_outputs.next_last_action, reset=torch.zeros_like(ours.reset)
        )
        ours = after._replace(core_state=our_outputs.next_core_state)
        theirs = after._replace(core_state=their_outputs.next_core_state)
    return max(map(_difference, our_outputs[1:4], their_outputs[1:4]))


def _check_action(policy: StepPolicy, found: StepOutputs) -> None:
    """Compare actions with those of the same logits: rounding may make another one the most likely."""
    most_likely = policy.actions.choose(found.logits, torch.zeros(len(found.logits), policy.actions.noise_size)).numpy()
    expected = flat({"action": policy.actions.to_env(most_likely), "next_last_action": most_likely})
    for name, tensor in flat({"action": found.action, "next_last_action": found.next_last_action}).items():
        seen, wanted = tensor.numpy(), expected[name]
        if seen.shape != wanted.shape or not np.allclose(seen, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise SeedrlError(f"{name} of the exported policy is not the most likely one: {seen} instead of {wanted}")


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not ours.numel():
        return 0.0
    difference = ((ours - theirs).abs() / ours.abs().clamp(min=1)).max().item()
    return difference if math.isfinite(difference) else math.inf


def _like(spec: EnvSpec, tree: Observation | None, make: Callable[..., Tensor]) -> Observation:
    """Make a tree of observations of make(leaf, is_mask), or make(leaf, is_mask, values) if a tree has values."""
    found = {}
    for name, leaf in zip(names(spec.observation), spec.observations, strict=True):
        before = () if tree is None else (tree[name] if isinstance(tree, dict) else tree,)
        found[name] = make(leaf, name == spec.mask and bool(name), *before)
    return found if isinstance(spec.observation, dict) else found[""]


def _random(leaf: ArraySpec, is_mask: bool, rows: int, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    shape = (rows, *leaf.shape)
    if is_mask:
        mask = torch.randint(2, shape, generator=generator)
        mask.flatten(1)[:, -1] = 1
        return mask.to(dtype)
    if dtype.is_floating_point:
        return (3 * torch.randn(shape, generator=generator)).to(dtype)
    high = leaf.values or (2 if dtype == torch.bool else min(256, torch.iinfo(dtype).max + 1))
    return torch.randint(high, shape, generator=generator).to(dtype)


def _smallest(leaf: ArraySpec, is_mask: bool, values: Tensor) -> Tensor:
    return values if is_mask else torch.zeros_like(values)


def _largest(leaf: ArraySpec, is_mask: bool, values: Tensor) -> Tensor:
    """Return the largest category or byte, 100 for floats, and a mask that allows everything."""
    dtype = values.dtype
    if is_mask or dtype == torch.bool:
        return torch.ones_like(values)
    if dtype.is_floating_point:
        return torch.full_like(values, 100.0)
    return torch.full_like(values, leaf.values - 1 if leaf.values else min(255, torch.iinfo(dtype).max))
