"""Steps of the policy that are recorded once and then replayed: the host launches one graph instead of every kernel.

A graph has the shapes, the addresses and the weights' addresses of the step that was recorded, so there is one for each
size of batches and for each replica of the policy, and everything that changes from batch to batch is in memory that
stays where it is (`staging`). Noise is drawn outside. All graphs share their temporary memory, for no two of them run
at a time. Knows nothing of what a step computes.

Rows of opponents and batches that are not padded run without a graph.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from seedrl.errors import ConfigError
from seedrl.serving.policy_step import Inputs, Kind, PolicyStep, run_model


class Program(Protocol):
    """Runs steps of the policy that is trained."""

    def prepare(self, model: nn.Module, inputs: Inputs, kind: Kind) -> None:
        """Run one of this size, with inputs of the spare slot, so that later ones need nothing new."""

    def run(self, model: nn.Module, inputs: Inputs, kind: Kind) -> Tensor:
        """Return the actions, when the rows are being recorded."""


class Eager:
    """Launches kernel by kernel. Owned by the server thread."""

    def __init__(self, step: PolicyStep) -> None:
        self._step = step

    def prepare(self, model: nn.Module, inputs: Inputs, kind: Kind) -> None:
        self.run(model, inputs, kind)

    def run(self, model: nn.Module, inputs: Inputs, kind: Kind) -> Tensor:
        return self._step.run(partial(run_model, model), inputs, kind)


class Recorded(NamedTuple):
    graph: Any
    action: Tensor  # [N, ...]  where every replay leaves it
    kind: Kind


class Graphs:
    """Replays what `prepare` has recorded. Owned by the server thread; its stream has to be the current one."""

    def __init__(self, eager: Eager, device: torch.device) -> None:
        self._eager = eager
        self._module = torch.get_device_module(device)
        self._pool = self._module.graph_pool_handle()
        self._recorded: dict[tuple[nn.Module, int], Recorded] = {}

    def prepare(self, model: nn.Module, inputs: Inputs, kind: Kind) -> None:
        self._eager.run(model, inputs, kind)  # libraries choose and allocate here, which they must not while recording
        self._recorded[model, len(inputs.noise)] = self._record(model, inputs, kind)

    def run(self, model: nn.Module, inputs: Inputs, kind: Kind) -> Tensor:
        """Replay the step of this size; record it again if it has begun to need more, such as exploration."""
        key = model, len(inputs.noise)
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._eager.run(model, inputs, kind)
        if not recorded.kind.includes(kind):
            recorded = self._recorded[key] = self._record(model, inputs, recorded.kind.joined(kind))
        recorded.graph.replay()
        return recorded.action

    def _record(self, model: nn.Module, inputs: Inputs, kind: Kind) -> Recorded:
        """Record a step without running it. What other threads do meanwhile, such as an update, does not matter."""
        graph = self._module.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            action = self._eager.run(model, inputs, kind)
        except RuntimeError as error:
            raise ConfigError(
                f"the model cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}); set serving.graphs=false"
            ) from error
        finally:
            graph.capture_end()
        return Recorded(graph, action, kind)
