"""Every kind of observation with every kind of action, through a real stream into real updates."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import Arrays, ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec, discrete, leaves, tree_map
from seedrl.wire.messages import Welcome
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.waiting import eventually

IMAGE = ArraySpec((3, 40, 40), "uint8")
OBSERVATIONS: dict[str, Any] = {
    "box": ArraySpec((5,), "float32"),
    "box-float64-rank-2": ArraySpec((2, 3), "float64"),
    "box-int16-rank-0": ArraySpec((), "int16"),
    "image": IMAGE,
    "grid-channels-last": ArraySpec((7, 7, 3), "uint8"),
    "discrete": ArraySpec((), "int64", values=6),
    "multi-discrete": ArraySpec((3,), "int64", values=4),
    "multi-binary": ArraySpec((9,), "int8"),
    "dict": {"camera/left": IMAGE, "goal": ArraySpec((), "int64", values=3), "joints": ArraySpec((4,), "float64")},
}
ACTIONS: dict[str, Any] = {
    "discrete": discrete(5),
    "multi-discrete": CategoricalSpec((3, 3, 2), (3,)),
    "multi-binary": CategoricalSpec((2,) * 4, (2, 2)),
    "box": ContinuousSpec((-2.0, -1.0), (2.0, 1.0), (2,)),
    "box-unbounded-rank-2": ContinuousSpec((float("-inf"),) * 4, (float("inf"),) * 4, (2, 2)),
    "tuple": {"0": discrete(3), "1": ContinuousSpec((0.0,), (1.0,), (1,))},
}


class AnyPool:
    """Environments of noise with any spaces. `wrong` says which actions were none of theirs."""

    def __init__(self, job: Welcome, spec: EnvSpec, mask: NDArray[np.int8] | None = None) -> None:
        self.spec = spec
        self.wrong: list[str] = []
        self._mask = mask
        self._random = np.random.default_rng(job.seed)
        self._flags = np.full(job.num_envs, TERMINATED, np.uint8)
        self._done = deque(np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size))

    def recv(self) -> Rows:
        env_id = self._done.popleft()
        ended = (self._flags[env_id] & ENDED) != 0
        ending = self._random.choice([0, 0, 0, 0, TERMINATED, TRUNCATED], len(env_id))
        flags = self._flags[env_id] = np.where(ended, RESET, ending)
        observation = tree_map(lambda leaf: self._noise(leaf, len(env_id)), self.spec.observation)
        if self._mask is not None:
            assert isinstance(observation, dict)
            observation["action_mask"] = np.repeat(self._mask[np.newaxis], len(env_id), axis=0)
        return Rows(env_id, observation, np.where(ended, 0, 1).astype(np.float32), flags.astype(np.uint8))

    def _noise(self, leaf: ArraySpec, rows: int) -> NDArray[Any]:
        noise = self._random.integers(0, leaf.values or 100, (rows, *leaf.shape))
        return noise.astype(leaf.dtype)

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        for leaf, values in zip(self.spec.actions, leaves(action), strict=True):
            if values.shape != (len(env_id), *leaf.shape) or values.dtype != leaf.dtype:
                self.wrong.append(f"{values.dtype}{values.shape} for {leaf}")
            entries = values.reshape(len(env_id), -1)
            low = np.zeros(1) if isinstance(leaf, CategoricalSpec) else np.array(leaf.low)
            high = np.array(leaf.sizes) - 1 if isinstance(leaf, CategoricalSpec) else np.array(leaf.high)
            if (entries < low).any() or (entries > high).any() or not np.isfinite(entries).all():
                self.wrong.append(f"{entries} for {leaf}")
            if self._mask is not None and not self._mask[entries].all():
                self.wrong.append(f"a forbidden choice of {entries}")
        self._done.append(env_id)

    def close(self) -> None:
        pass


def pairs() -> Iterator[Any]:
    """Yield every pair; those of the short suite have each observation with two actions, each action with three."""
    for (i, observation), (j, action) in itertools.product(enumerate(OBSERVATIONS), enumerate(ACTIONS)):
        marks = () if (i + j) % 3 == 0 else (pytest.mark.long,)
        yield pytest.param(observation, action, id=f"{observation}-{action}", marks=marks)


@pytest.mark.parametrize(("observation", "action"), list(pairs()))
def test_space_is_streamed_and_trained_on(
    start_learner: StartLearner, start_actor: StartActor, observation: str, action: str
) -> None:
    spec = EnvSpec(OBSERVATIONS[observation], ACTIONS[action])
    memory = {"gru": 8} if action == "tuple" else {}  # so that the newest action is an input as well
    learner = start_learner(model__name="auto", metrics="", **{f"model__{name}": size for name, size in memory.items()})
    actor = start_actor(learner.address, lambda job, threads: AnyPool(job, spec))
    eventually(lambda: learner.service.learning.updates >= 3 or learner.ended())
    assert learner.service.learning.skipped_updates == 0
    assert actor.pools[0].wrong == []
    assert learner.service.inference.sessions.spec.result() == spec


def test_mask_of_the_environment_forbids_choices(start_learner: StartLearner, start_actor: StartActor) -> None:
    allowed = np.array([0, 1, 0, 1, 1], np.int8)
    spec = EnvSpec({"action_mask": ArraySpec((5,), "int8"), "state": ArraySpec((3,), "float32")}, discrete(5))
    learner = start_learner(model__name="auto", metrics="")
    actor = start_actor(learner.address, lambda job, threads: AnyPool(job, spec, allowed))
    eventually(lambda: learner.service.learning.updates >= 10)
    assert actor.pools[0].wrong == []
    assert learner.service.learning.skipped_updates == 0
