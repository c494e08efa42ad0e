"""Updates of several ranks, as real processes that average with gloo: `torchrun … -m tests.ranked OUT`.

Every case makes the same few train batches on every rank; a rank trains on its part of each. The results are
written to OUT/<rank>/<case>.safetensors; `joined` returns those of one process on whole batches.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig, DQNConfig, Optimizer
from seedrl.algorithms.vtrace import VTrace
from seedrl.config import ModelConfig
from seedrl.learning.learner import Learner
from seedrl.models.build import build_model
from seedrl.models.mlp import Normalize
from seedrl.ranks.ending import ending_at_once
from seedrl.ranks.group import Ranks
from seedrl.ranks.separate import SERVING, TRAINING, Inbox, MirroredLearner, Outbox, Preferences, RemoteLearner
from seedrl.run.identity import identity
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.types import Ticket, Unrolls
from tests.builders import LearnerParts, learner_parts, one_step, record, weights
from tests.fakes import AuxModel, TinyModel, make_spec
from tests.integration.waiting import DEADLINE

WORLD = 2
UPDATES = 5


class Hoarder(TinyModel):
    """A model with a parameter that no output depends on."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.unused = nn.Parameter(torch.ones(3))


class WithCritic(VTrace):
    """Also trains a network of its own, which has running statistics, to predict the next reward."""

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        super().__init__(config, actions, model)
        self.networks = nn.Sequential(Normalize(5), nn.Linear(5, 1))

    def loss(self, batch: Unrolls, forward: Forward, fraction: float) -> Loss:
        loss, valid = super().loss(batch, forward, fraction), self.valid(batch)
        predicted = self.networks(batch.inputs.observation[:-1].flatten(0, 1)).view(valid.shape)
        error = (valid * (predicted - batch.inputs.reward[1:]).square()).sum() / valid.sum().clamp(min=1)
        return loss._replace(total=loss.total + error)


@dataclass(frozen=True)
class Case:
    model: ModelConfig | Callable[[EnvSpec], nn.Module]
    spec: EnvSpec = field(default_factory=lambda: make_spec((5,)))
    share: int = 3  # unrolls of one rank's train batch
    algorithm: dict[str, Any] = field(default_factory=dict)
    sync_every: int = 1
    is_last_idle: bool = False  # the last rank has no train batches
    draws: bool = False  # noise, so that the updates of ranks are not those of one process
    poisoned: tuple[int, ...] = ()  # updates in which the last rank's rewards are infinite

    def parts(self, batch_size: int, ranks: Ranks | None = None) -> LearnerParts:
        torch.manual_seed(7)
        model = (
            build_model(self.model, self.spec, seed=7) if isinstance(self.model, ModelConfig) else self.model(self.spec)
        )
        # An epsilon that is not far below the gradients: rounding must not decide where a step goes.
        algorithm = one_step(**{"learning_rate": 0.01, "epsilon": 1e-3, "max_grad_norm": 0.1, **self.algorithm})
        return learner_parts(
            algorithm, model, self.spec, batch_size=batch_size, batches=WORLD, ranks=ranks, sync_every=self.sync_every
        )


SMALL = {"layers": [8]}
CRITIC = {"name": "tests.ranked:WithCritic"}
CASES = {
    "mlp": Case(ModelConfig(**SMALL)),
    "lstm": Case(ModelConfig(lstm=6, **SMALL)),
    "popart": Case(ModelConfig(popart=True, **SMALL), algorithm={"reward_scale": 30.0}),
    "normalize": Case(ModelConfig(normalize=True, **SMALL)),
    "grid": Case(ModelConfig("grid"), make_spec((3, 4, 4), "uint8"), share=8),  # it looks at every eighth row
    "rmsprop": Case(ModelConfig(**SMALL), algorithm={"optimizer": Optimizer.rmsprop}),
    "passes": Case(ModelConfig(**SMALL), algorithm={"passes": 2}),
    "unused": Case(Hoarder),
    "aux": Case(AuxModel),
    "networks": Case(ModelConfig(**SMALL), algorithm=CRITIC),
    "dqn": Case(
        ModelConfig(lstm=6, popart=False, **SMALL),
        algorithm={"name": "dqn", "dqn": DQNConfig(burn_in=1, target_period=2), "max_grad_norm": 1.0},
    ),
    "sac": Case(
        ModelConfig(state_std=True, **SMALL),
        EnvSpec(ArraySpec((5,), "float32"), ContinuousSpec((-1.0, -1.0), (1.0, 1.0), (2,))),
        algorithm={"name": "sac"},
        draws=True,
    ),
    "poisoned": Case(ModelConfig(**SMALL), poisoned=(1, 3)),
    "idle": Case(ModelConfig(normalize=True, popart=True, lstm=6, **SMALL), is_last_idle=True),
    "idle_local": Case(ModelConfig(normalize=True, popart=True, **SMALL), is_last_idle=True, sync_every=2),
    "networks_local": Case(ModelConfig(**SMALL), sync_every=2, algorithm=CRITIC),
    "local": Case(ModelConfig(normalize=True, popart=False, **SMALL), sync_every=UPDATES - 1),
    "local_popart": Case(ModelConfig(popart=True, **SMALL), sync_every=UPDATES, algorithm={"reward_scale": 30.0}),
}


def train(case: Case, parts: LearnerParts, part_of: int, rank: int) -> dict[str, Tensor]:
    """Record the whole of each batch and train on this rank's part of it."""
    seen = {}
    for update in range(UPDATES):
        parts.steps = 100 * update
        record(parts.store, parts.learner.model, case.spec, unrolls=case.share * WORLD, seed=update)
        for part in range(part_of):
            if case.is_last_idle and part == rank == WORLD - 1:
                parts.learner.assist(parts.store.blank(case.share))
                parts.store.take(case.share, timeout=0)
            elif part == rank:
                assert parts.update()
            else:
                parts.store.take(case.share, timeout=0)
        seen |= {f"{update}/{name}": tensor for name, tensor in weights(parts.learner._trained).items()}
        seen[f"{update}/versions"] = torch.tensor([parts.metrics.updates, parts.metrics.skipped_updates])
        seen[f"{update}/grad_norm"] = torch.tensor(parts.metrics.grad_norm)
    return seen


def joined(case: Case) -> dict[str, Tensor]:
    return train(case, case.parts(case.share * WORLD), part_of=1, rank=0)


def poison(parts: LearnerParts, updates: tuple[int, ...]) -> None:
    """Make this rank's rewards infinite in some updates."""
    take, number = parts.store.take, iter(range(WORLD * UPDATES))

    def taken(count: int, timeout: float) -> Any:
        unrolls = take(count, timeout)
        assert unrolls is not None
        if next(number) // WORLD in updates:
            unrolls.inputs.reward.fill_(math.inf)
        return unrolls

    parts.store.take = taken  # type: ignore[method-assign]


SEPARATE = {
    "separate": Case(ModelConfig(lstm=6, popart=True, **SMALL), algorithm={"passes": 2, "learning_rate_end": 0.001}),
    "separate_dqn": Case(ModelConfig(popart=False, **SMALL), algorithm={"name": "dqn", "minibatches": 3}),
}


class Noted:
    """The priorities that the store is handed: entries, generations and values."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = [torch.zeros(0, 3)]

    def prefer(self, ticket: Ticket, priority: Tensor) -> None:
        columns = [torch.from_numpy(ticket.entry), torch.from_numpy(ticket.generation), priority]
        self._rows.append(torch.stack([column.float() for column in columns], dim=1))

    def all(self) -> Tensor:
        return torch.cat(self._rows)


def serve_apart(case: Case, ranks: Ranks) -> dict[str, Tensor]:
    """Return what rank 0 serves after every update that rank 1 has made on its unrolls."""
    parts = case.parts(case.share * WORLD)
    batch_size = parts.config.algorithm.batch_size
    noted = Noted()
    remote = RemoteLearner(ranks, parts.learner.model, parts.metrics, noted.prefer)
    seen = {}
    for update in range(UPDATES):
        record(parts.store, remote.model, case.spec, batch_size, seed=update, policy_version=parts.policy.version)
        unrolls = parts.store.take(batch_size, timeout=0)
        assert unrolls is not None
        remote.train(unrolls)
        remote.publish(parts.policy)
        with parts.policy.read() as (model, version):
            seen |= {f"{update}/{name}": tensor for name, tensor in weights(model).items()}
        metrics = parts.metrics
        seen[f"{update}/counted"] = torch.tensor([version, metrics.updates, metrics.unrolls_trained])
        seen[f"{update}/lag"] = torch.tensor([metrics.policy_lag.sum, metrics.learning_rate])
    seen["tensors"] = torch.tensor(len(remote.tensors()))
    seen["preferred"] = noted.all()
    seen["publish_lags"] = torch.tensor(parts.metrics.publish_lag_seconds.count)
    return seen


def train_apart(case: Case, ranks: Ranks) -> None:
    """Train on the unrolls of rank 0, as rank 1 does."""
    preferences, parts = Preferences(), case.parts(case.share * WORLD)
    learner = Learner(
        parts.config,
        parts.learner.model,
        build_algorithm(parts.config.algorithm, Actions(case.spec), parts.learner.model),
        parts.metrics,
        env_steps=lambda: 100 * parts.metrics.updates,
        prefer=preferences.prefer,
    )
    mirrored = MirroredLearner(ranks, learner, parts.metrics, preferences)
    inbox = Inbox(ranks, case.spec, torch.device("cpu"))
    for _ in range(UPDATES):
        mirrored.train(inbox.take(parts.config.algorithm.batch_size, timeout=0))
        mirrored.publish(Outbox(ranks))
    ranks.broadcast_tensors(learner.tensors(), TRAINING)


def train_in_one(case: Case) -> dict[str, Tensor]:
    """Return what one process serves after the same updates."""
    parts, noted = case.parts(case.share * WORLD), Noted()
    parts.learner._prefer = noted.prefer
    seen = {}
    for update in range(UPDATES):
        parts.steps = 100 * update
        parts.record(seed=update, policy_version=parts.policy.version)
        assert parts.update()
        parts.learner.publish(parts.policy)
        seen |= {f"{update}/{name}": tensor for name, tensor in weights(parts.learner.model).items()}
        metrics = parts.metrics
        seen[f"{update}/counted"] = torch.tensor([parts.policy.version, metrics.updates, metrics.unrolls_trained])
        seen[f"{update}/lag"] = torch.tensor([metrics.policy_lag.sum, metrics.learning_rate])
    seen["tensors"] = torch.tensor(len(parts.learner.tensors()))
    seen["preferred"] = noted.all()
    return seen


TYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)


def tensors_of_all_types() -> list[Tensor]:
    """Return two tensors of each type, one of which is not contiguous."""
    numbers = torch.arange(12).reshape(3, 4) % 2
    return [each.to(getattr(torch, name)) for name in TYPES for each in (numbers, numbers.t())]


def receive(ranks: Ranks) -> dict[str, Tensor]:
    """Return rank 1's tensors as bytes, by their type and number."""
    tensors = tensors_of_all_types()
    if ranks.identity.rank != 1:
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
    ranks.broadcast(tensors, source=1)
    return {str(number): tensor.contiguous().view(torch.uint8) for number, tensor in enumerate(tensors)}


def fail_alone(ranks: Ranks) -> None:
    """Ask for what gloo does not do, which is no fault of another rank; it has sent nothing by then."""
    with pytest.raises(RuntimeError, match="scalar type"):
        ranks.begin_all_reduce_sum(torch.ones(2).to(torch.uint16))()


def main(out: Path) -> None:
    ranks = Ranks.join(identity("learner"), torch.device("cpu"), timeout=DEADLINE)
    rank = ranks.identity.rank
    (out / str(rank)).mkdir(parents=True)
    for name, case in CASES.items():
        parts = case.parts(case.share, ranks)
        if case.poisoned and rank == WORLD - 1:
            poison(parts, case.poisoned)
        seen = train(case, parts, WORLD, rank)
        safetensors.torch.save_file(
            {key: each.contiguous() for key, each in seen.items()}, out / str(rank) / f"{name}.safetensors"
        )
    safetensors.torch.save_file(receive(ranks), out / str(rank) / "types.safetensors")
    fail_alone(ranks)
    for name, case in SEPARATE.items():
        if rank == SERVING:
            safetensors.torch.save_file(serve_apart(case, ranks), out / f"{name}.safetensors")
        else:
            train_apart(case, ranks)
    ranks.all_gather_object(["finished"])  # so that no rank ends while another one still receives from it
    ranks.leave()


if __name__ == "__main__":
    with ending_at_once():
        main(Path(sys.argv[1]))
