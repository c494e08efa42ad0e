"""Makes the inputs of the learning half: specs, model inputs, unrolls in a store, learners. All of them tiny.

from tests.builders import learner_parts, model_input, record
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.base import networks_of
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.columns import Indices, Record
from seedrl.config import LearnerConfig, StopConfig
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics
from seedrl.models.base import core_size_of
from seedrl.policy import Policy
from seedrl.ranks.averaging import RankAverager
from seedrl.ranks.group import Ranks
from seedrl.rows import RESET, TERMINATED
from seedrl.selection.fifo import Fifo
from seedrl.specs import EnvSpec
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelInput, ModelOutput
from tests.fakes import TinyModel, make_spec


def model_input(spec: EnvSpec, rows: int, batch: int, *, seed: int = 0, resets: bool = True) -> ModelInput:
    """Return random rows [rows, batch, ...]; with `resets` about every fifth of them begins an episode."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (rows, batch, *spec.observation.shape), getattr(torch, spec.observation.dtype)
    if dtype.is_floating_point:
        observation = torch.randn(shape, generator=generator, dtype=dtype)
    else:
        observation = torch.randint(0, 100, shape, generator=generator, dtype=dtype)
    reset = (torch.rand(rows, batch, generator=generator) < 0.2) & torch.tensor(resets)
    return ModelInput(
        observation=observation,
        reward=torch.randn(rows, batch, generator=generator).masked_fill(reset, 0),
        last_action=_some_actions(spec, rows, batch, generator).masked_fill(reset.view(rows, batch, *_ones(spec)), 0),
        reset=reset,
    )


def _some_actions(spec: EnvSpec, rows: int, batch: int, generator: torch.Generator) -> Tensor:
    actions = Actions(spec)
    if actions.shape:
        return torch.randn(rows, batch, *actions.shape, generator=generator)
    return torch.randint(spec.policy_size, (rows, batch), generator=generator)


def _ones(spec: EnvSpec) -> list[int]:
    return [1] * len(Actions(spec).shape)


def row_of(inputs: ModelInput, t: int) -> ModelInput:
    """Return row t as an input of one row."""
    return ModelInput(*(tensor[t : t + 1] for tensor in inputs))


def record(
    store: Store,
    model: nn.Module,
    spec: EnvSpec,
    unrolls: int,
    *,
    policy_version: int = 0,
    seed: int = 0,
    reward: Callable[[Tensor], Tensor] = lambda reward: reward,
    observation: Callable[[Tensor], Tensor] = lambda observation: observation,
) -> None:
    """Commit `unrolls` of random rows, answered by `model` one at a time, through the calls that inference makes."""
    inputs = model_input(spec, store.columns.unroll_length + 1, unrolls, seed=seed)
    inputs = inputs._replace(reward=reward(inputs.reward), observation=observation(inputs.observation))
    entry, actions = store.reserve(unrolls), Actions(spec)
    assert len(entry) == unrolls, "the store is too small for this test"
    core_state = torch.randn(unrolls, core_size_of(model), generator=torch.Generator().manual_seed(seed))
    ends = torch.cat([inputs.reset[1:], torch.zeros(1, unrolls, dtype=torch.bool)])
    for t in range(store.columns.unroll_length + 1):
        row = row_of(inputs, t)
        before = core_state
        with torch.inference_mode():
            output, core_state = model(row, core_state)
        nothing = np.zeros(unrolls, np.int64)
        place = store.columns.locate(entry, nothing + t, age=nothing)
        keep_core_state(store, entry, nothing + t, before)
        store.columns.write_frames(place.frame, row.observation[0].numpy())
        reset, ended = inputs.reset[t].numpy(), ends[t].numpy()
        known = Record(
            reward=row.reward[0].numpy(),
            flags=(RESET * reset + TERMINATED * ended).astype(np.uint8),
            age=nothing,
            last_action=row.last_action[0].numpy(),
            action=actions.choose(output.logits[0], torch.zeros(unrolls, actions.noise_size)).numpy(),
            policy_version=np.array(policy_version),
        )
        store.columns.write_record(place, known)
        store.columns.write_output(place, ModelOutput(output.logits[0], output.value[0]))
    store.commit(entry)


def keep_core_state(store: Store, entry: Indices, t: Indices, core_state: Tensor) -> None:
    """Keep the core_state before rows t, as inference does."""
    if core_state.shape[1]:
        entries = store.columns.core_entries(entry, t)
        store.columns.keep_core_state([torch.from_numpy(entry) for entry in entries], core_state)


@dataclass
class LearnerParts:
    """A learner with its parts; `steps` is the number of environment steps that it sees."""

    learner: Learner
    store: Store
    policy: Policy
    metrics: LearningMetrics
    config: LearnerConfig
    spec: EnvSpec
    steps: int = 0

    def record(self, batches: int = 1, *, policy_version: int = 0, seed: int = 0) -> None:
        unrolls = batches * self.config.algorithm.batch_size
        record(self.store, self.learner.model, self.spec, unrolls, policy_version=policy_version, seed=seed)

    def update(self) -> bool:
        """Train on the next train batch; return false if there is none."""
        unrolls = self.store.take(self.config.algorithm.batch_size, timeout=0)
        if unrolls is not None:
            self.learner.train(unrolls)
        return unrolls is not None


def one_step(**settings: Any) -> AlgorithmConfig:
    """Return the settings of plain V-trace, with one gradient step per train batch and constant schedules."""
    return AlgorithmConfig(
        **{
            "name": "vtrace",
            "passes": 1,
            "minibatches": 1,
            "on_policy": False,
            "trace_lambda": 1.0,
            "normalize_advantage": False,
            "entropy_cost": 0.01,
            "entropy_cost_end": None,
            "learning_rate": 1e-3,
            "learning_rate_end": None,
            "max_grad_norm": 40.0,
            **settings,
        }
    )


def learner_parts(
    algorithm: AlgorithmConfig | None = None,
    model: nn.Module | None = None,
    spec: EnvSpec | None = None,
    *,
    stop_at: int = 1000,
    batches: int = 4,
    batch_size: int = 2,
    seed: int = 0,
    ranks: Ranks | None = None,
    sync_every: int = 1,
    compile: bool = False,
) -> LearnerParts:
    """Return a learner of a TinyModel, or of `model`, and a store for `batches` train batches of unrolls of 3 steps."""
    spec = spec or make_spec()
    algorithm = algorithm or one_step()
    algorithm.batch_size, algorithm.unroll_length = batch_size, 3
    config = LearnerConfig(algorithm=algorithm, stop=StopConfig(env_steps=stop_at), compile=compile)
    torch.manual_seed(seed)
    model = model or TinyModel(spec)
    sizes = StoreSizes(1, batch_size * batches, unroll_length=3, frame_stack=1, core_size=core_size_of(model))
    store = Store(spec, Fifo(), sizes, torch.device("cpu"))
    policy, metrics = Policy(model, version=0), LearningMetrics()
    parts: LearnerParts
    built = build_algorithm(algorithm, Actions(spec, squash=True), model)
    learner = Learner(
        config,
        model,
        built,
        metrics,
        env_steps=lambda: parts.steps,
        prefer=store.prefer,
        averager=None if ranks is None else RankAverager(ranks, model, networks_of(built), sync_every),
    )
    parts = LearnerParts(learner, store, policy, metrics, config, spec)
    return parts


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Return whether two states hold the same tensors, bit for bit."""
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
