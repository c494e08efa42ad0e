"""Training with a compiled network, in a process of its own, as compilers leave threads: `python -m tests.compiled`."""

import os
import sys

import torch
from torch import Tensor

from seedrl.config import ModelConfig
from seedrl.models.build import build_model
from tests.builders import LearnerParts, learner_parts, one_step, weights
from tests.fakes import make_spec

UPDATES = 3


def parts(compile: bool) -> LearnerParts:
    """Return a learner that makes several minibatches, has running statistics, and rescales its value head in place."""
    spec = make_spec((5,))
    algorithm = one_step(name="ppo", minibatches=2, learning_rate=0.01, epsilon=1e-3, reward_scale=30.0)
    model = build_model(ModelConfig(layers=[8]), spec, seed=7)
    return learner_parts(algorithm, model, spec, batch_size=4, batches=1, compile=compile)


def trained(parts: LearnerParts, first: int = 0) -> dict[str, Tensor]:
    for update in range(first, first + UPDATES):
        parts.record(seed=update)
        assert parts.update()
    assert not parts.metrics.skipped_updates
    return weights(parts.learner.model)


def main() -> None:
    compiled, plain = parts(compile=True), parts(compile=False)
    names, initial = list(plain.learner.tensors()), weights(plain.learner.model)
    assert list(compiled.learner.tensors()) == names
    mine, other = trained(compiled), trained(plain)
    assert not torch.equal(other["policy_head.weight"], initial["policy_head.weight"])
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"], "nothing was compiled, so nothing was compared"
    assert not counters["graph_break"]

    resumed, saved = parts(compile=False), {name: t.clone() for name, t in compiled.learner.tensors().items()}
    assert list(saved) == list(plain.learner.tensors())
    resumed.learner.model.load_state_dict({n.removeprefix("model/"): t for n, t in saved.items() if "model/" in n})
    resumed.learner.load(saved)
    mine, other = trained(compiled, UPDATES), trained(resumed, UPDATES)
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    print(f"compared {len(names)} tensors")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
