"""Whether two policies are the same: inputs worth trying, and how far apart what comes out is. Knows no format."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from seedrl.errors import SeedrlError
from seedrl.specs import ArraySpec, EnvSpec, names
from seedrl.trained.step import StepInputs, StepOutputs, StepPolicy, flat, following
from seedrl.types import Observation

TOLERANCE = 1e-4  # relative to numbers above 1, absolute below: sums in another order differ by less
SIZES = (1, 2, 7)  # of batches
STEPS = 8  # that memories are followed for

Step = Callable[[StepInputs], StepOutputs]


def largest_difference(policy: StepPolicy, other: Step) -> float:
    """Between what two policies give for the same inputs. Raises if an action is not the likeliest within bounds."""
    largest = 0.0
    for inputs in tried(policy):
        live, seen = policy.step(inputs), other(inputs)
        largest = max(largest, *map(_apart, live[1:4], seen[1:4]))
        _check_action(policy, seen)
    return max(largest, _drift(policy, other))


def tried(policy: StepPolicy) -> Iterator[StepInputs]:
    """Ordinary inputs in batches of several sizes, then what is rare: all episodes begin, numbers are large or zero."""
    for seed, rows in enumerate(SIZES):
        yield random_inputs(policy, rows, seed)
    ordinary = random_inputs(policy, SIZES[-1], len(SIZES))
    everywhere = torch.ones_like(ordinary.reset)
    yield ordinary._replace(reset=everywhere, core_state=torch.full_like(ordinary.core_state, math.nan))
    yield ordinary._replace(reset=~everywhere)
    spec = policy.spec
    yield ordinary._replace(observation=_like(spec, ordinary.observation, _least), reward=ordinary.reward * 1e3)
    yield ordinary._replace(observation=_like(spec, ordinary.observation, _most), reward=ordinary.reward * -1e3)


def random_inputs(policy: StepPolicy, rows: int, seed: int) -> StepInputs:
    """Observations of the policy's spaces; some rows begin an episode. At least one choice of a mask is allowed."""
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
    """The difference after some steps, each policy keeping its own memory."""
    live = seen = random_inputs(policy, SIZES[-1], seed=100)
    for number in range(STEPS):
        ours, theirs = policy.step(live), other(seen)
        after = random_inputs(policy, SIZES[-1], seed=101 + number)
        live = following(live, ours, after.observation, after.reward)
        # The actions are ours on both sides: where two are as likely, either may be chosen.
        seen = following(seen, theirs, after.observation, after.reward)._replace(last_action=live.last_action)
    return max(map(_apart, ours[1:4], theirs[1:4]))


def _check_action(policy: StepPolicy, seen: StepOutputs) -> None:
    """Of logits that differ in their last digits another action may be the likeliest; so these decide."""
    likeliest = policy.actions.choose(seen.logits, torch.zeros(len(seen.logits), policy.actions.noise_size))
    remembered = likeliest.numpy()
    expected = flat({"action": policy.actions.to_env(remembered), "next_last_action": remembered})
    for name, tensor in flat({"action": seen.action, "next_last_action": seen.next_last_action}).items():
        found, wanted = tensor.numpy(), expected[name]
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise SeedrlError(f"{name} of the exported policy is not the likeliest: {found} instead of {wanted}")


def _apart(live: Tensor, seen: Tensor) -> float:
    if live.shape != seen.shape or live.dtype != seen.dtype:
        return math.inf
    if not live.numel():
        return 0.0
    apart = ((live - seen).abs() / live.abs().clamp(min=1)).max().item()
    return apart if math.isfinite(apart) else math.inf


def _like(spec: EnvSpec, tree: Observation | None, make: Callable[..., Tensor]) -> Observation:
    """A tree of what is made for each leaf: (leaf, is_mask), or (leaf, is_mask, values) of another tree."""
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


def _least(leaf: ArraySpec, is_mask: bool, values: Tensor) -> Tensor:
    return values if is_mask else torch.zeros_like(values)


def _most(leaf: ArraySpec, is_mask: bool, values: Tensor) -> Tensor:
    """The largest there is of integers, a large number of others; all is allowed."""
    dtype = values.dtype
    if is_mask or dtype == torch.bool:
        return torch.ones_like(values)
    if dtype.is_floating_point:
        return torch.full_like(values, 100.0)
    return torch.full_like(values, leaf.values - 1 if leaf.values else min(255, torch.iinfo(dtype).max))
