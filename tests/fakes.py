"""Stand-ins for the clock, the environments and the model: small, deterministic, and the same for every test.

from tests.fakes import FakeClock, FakePool, TinyModel, make_job, make_spec
"""

import queue
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seedrl.errors import EnvFailed
from seedrl.rows import ENDED, RESET, TERMINATED, Rows
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.types import ModelInput, ModelOutput
from seedrl.wire.messages import Welcome


class FakeClock:
    """A clock that moves only by `advance`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_spec(shape: tuple[int, ...] = (2,), dtype: str = "float32", num_actions: int = 3) -> EnvSpec:
    return EnvSpec(ArraySpec(shape, dtype), discrete(num_actions))


def make_job(num_envs: int = 4, group_size: int | None = None, **changes: Any) -> Welcome:
    job = Welcome(
        session_id=1,
        env_id="Fake-v0",
        options={},
        num_envs=num_envs,
        group_size=group_size or num_envs,
        seed=7,
    )
    return job._replace(**changes)


class FakePool:
    """Counting environments behind the Pool protocol, with envpool's NEXT_STEP resets.

    Row k of environment e observes e in its first entry, k in its second and zeros elsewhere; k counts all rows of that
    environment, reset rows too. An episode is a RESET row, then `episode_length` rows with reward 1; the last of them
    has the flags `ending`. `recv` and `send` may be called from two threads; `sent` keeps every (env_id, action).
    `FakePool(job, threads)` is what an actor calls; use functools.partial for the rest.
    """

    def __init__(
        self,
        job: Welcome,
        threads: int = 1,
        *,
        episode_length: int = 5,
        ending: int = TERMINATED,
        shape: tuple[int, ...] = (2,),
        dtype: str = "float32",
        num_actions: int = 3,
    ) -> None:
        self.spec = make_spec(shape, dtype, num_actions)
        self.sent: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        self.closed = False
        self._episode_length = episode_length
        self._ending = ending
        self._row = np.zeros(job.num_envs, np.int64)  # rows so far
        self._step = np.full(job.num_envs, -1)  # steps of the episode; the next row of -1 is a RESET
        self._groups: queue.Queue[NDArray[np.int32] | None] = queue.Queue()
        for group in np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size):
            self._groups.put(group)

    def recv(self) -> Rows:
        env_id = self._groups.get()
        if env_id is None:
            raise EnvFailed("the environments were abandoned")
        self._step[env_id] += 1
        step = self._step[env_id]
        flags = np.where(step == 0, RESET, np.where(step == self._episode_length, self._ending, 0)).astype(np.uint8)
        observation = np.zeros((len(env_id), *self.spec.observation.shape), self.spec.observation.dtype)
        entries = observation.reshape(len(env_id), -1)
        entries[:, 0] = env_id
        entries[:, 1] = self._row[env_id].astype(entries.dtype)
        self._row[env_id] += 1
        self._step[env_id[(flags & ENDED) != 0]] = -1
        return Rows(env_id, observation, (step > 0).astype(np.float32), flags)

    def send(self, action: NDArray[np.int32], env_id: NDArray[np.int32]) -> None:
        self.sent.append((env_id, action))
        self._groups.put(env_id)

    def abandon(self) -> None:
        """Let a thread that waits in `recv` return."""
        self._groups.put(None)

    def close(self) -> None:
        self.closed = True


class TinyModel(nn.Module):
    """A linear policy and value; with `core_size` also a leaky memory of the observations. Fulfils models.base.Model.

    Usable as `model.name=tests.fakes:TinyModel model.options={core_size: 3}`.
    """

    def __init__(self, spec: EnvSpec, core_size: int = 0) -> None:
        super().__init__()
        size = int(np.prod(spec.observation.shape))
        self.core_size = core_size
        self.memory = nn.Linear(size, core_size) if core_size else None
        self.heads = nn.Linear(size + core_size, spec.policy_size + 1)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        features = inputs.observation.flatten(2).float()
        if self.memory is not None:
            states = []
            for feature, reset in zip(features, inputs.reset, strict=True):
                core_state = core_state.masked_fill(reset.unsqueeze(-1), 0)
                core_state = torch.tanh(0.5 * core_state + self.memory(feature))
                states.append(core_state)
            features = torch.cat([features, torch.stack(states)], dim=-1)
        heads = self.heads(features)
        return ModelOutput(heads[..., :-1], heads[..., -1]), core_state


class AuxModel(TinyModel):
    """Also learns to predict the reward of each row, and reports how large its weights are."""

    def __init__(self, spec: EnvSpec, core_size: int = 0) -> None:
        super().__init__(spec, core_size)
        self.reward = nn.Linear(int(np.prod(spec.observation.shape)), 1)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = super().forward(inputs, core_state)
        if not torch.is_grad_enabled():
            return output, core_state
        error = (self.predicted(inputs) - inputs.reward).square()
        return output._replace(aux={"reward": 0.5 * error, "size": self.reward.weight.square().sum()}), core_state

    def predicted(self, inputs: ModelInput) -> Tensor:
        predicted: Tensor = self.reward(inputs.observation.flatten(2).float()).squeeze(-1)
        return predicted


class PacedModel(TinyModel):
    """Takes so many seconds for an update."""

    def __init__(self, spec: EnvSpec, seconds: float) -> None:
        super().__init__(spec)
        self._seconds = seconds

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            time.sleep(self._seconds)
        return super().forward(inputs, core_state)
