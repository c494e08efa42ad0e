"""A policy that does what counting environments want, and checks every unroll it is trained on.

Use as model.name=tests.chaos.model:CountingModel model.options={violations: FILE}. What is wrong with an unroll is
written to that file, a line of JSON each, and training goes on: whoever started the run reads it.
"""

import json
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seedrl.rows import ENDED, RESET
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput
from tests.chaos.counting import AGE, ENV, FLAGS, NONCE, NUM_ACTIONS, SIGNATURE, STEP, right_action

REMEMBERED = 10_000  # environments whose last unroll is known


class CountingModel(nn.Module):
    """Takes `right_action` with certainty; only its value learns, and an update takes `update_seconds` more."""

    core_size = 0

    def __init__(self, spec: EnvSpec, violations: str, update_seconds: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Linear(1, 1)
        self._update_seconds = update_seconds
        self._violations = Path(violations)
        self._check = UnrollCheck()

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            self._train_on(inputs)
        signature = inputs.observation[..., :SIGNATURE].long()
        logits = 1e4 * nn.functional.one_hot(right_action(signature), NUM_ACTIONS).float()
        return ModelOutput(logits, self.value(inputs.reward.unsqueeze(-1)).squeeze(-1)), core_state

    def _train_on(self, inputs: ModelInput) -> None:
        found = self._check.violations(inputs)
        if found:
            with self._violations.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in found)
        if self._update_seconds:
            time.sleep(self._update_seconds)  # as an accelerator would, it leaves the processor to others


class UnrollCheck:
    """Finds what may not be: unrolls of two pools or environments, gaps, repeats, misplaced resets, wrong actions.

    Remembers where the last unroll of each environment ended: the next one begins with that very row, the first with
    row 0. So every step of a session is trained on once, but for those after its last full unroll.
    """

    def __init__(self) -> None:
        self._ended_at: OrderedDict[tuple[int, int], int] = OrderedDict()  # (nonce, environment) → step

    def violations(self, inputs: ModelInput) -> list[str]:
        observation = inputs.observation.numpy().astype(np.int64)  # [T+1, B, size]
        wrong = {
            "torn observation": _torn(observation),
            "two sessions": _changes(observation[..., NONCE]),
            "two environments": _changes(observation[..., ENV]),
            "gap or repeat": np.diff(observation[..., STEP], axis=0) != 1,
            "reset out of place": _reset_out_of_place(observation, inputs.reset.numpy()),
            "action of another row": _wrong_actions(observation, inputs.last_action.numpy()),
            "reward of another row": inputs.reward.numpy() != (observation[..., AGE] > 0),
        }
        found = [
            f"{what}: {observation[:, unroll, :SIGNATURE].tolist()}"
            for what, where in wrong.items()
            for unroll in np.flatnonzero(where.any(axis=0))
        ]
        return found + [words for unroll in observation.swapaxes(0, 1) if (words := self._follows(unroll))]

    def _follows(self, unroll: NDArray[np.int64]) -> str:
        """Return what is wrong with where an unroll [T+1, size] begins; empty for nothing."""
        first, last = unroll[0], unroll[-1]
        environment = int(first[NONCE]), int(first[ENV])
        expected = self._ended_at.pop(environment, 0)
        self._ended_at[environment] = int(last[STEP])
        if len(self._ended_at) > REMEMBERED:
            self._ended_at.popitem(last=False)
        if first[STEP] == expected:
            return ""
        return f"unroll out of order: begins at {first[:SIGNATURE].tolist()}, expected step {expected}"


def _torn(observation: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows [T+1, B] that do not repeat their signature."""
    return np.asarray((observation[..., SIGNATURE:] != observation[..., :-SIGNATURE]).any(axis=-1))


def _changes(column: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(column != column[0])


def _reset_out_of_place(observation: NDArray[np.int64], reset: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A reset is flagged as such, has age 0, and comes after an end and nowhere else."""
    age, flags = observation[..., AGE], observation[..., FLAGS]
    wrong = (reset != (age == 0)) | (reset != ((flags & RESET) != 0))
    after_end = (flags[:-1] & ENDED) != 0
    wrong[1:] |= (reset[1:] != after_end) | (age[1:] != np.where(after_end, 0, age[:-1] + 1))
    return np.asarray(wrong)


def _wrong_actions(observation: NDArray[np.int64], last_action: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Check that the action of the row before is what the policy asked for; a reset remembers nothing."""
    right = np.where(observation[1:, :, AGE] == 0, 0, right_action(observation[:-1]))
    return np.asarray(last_action[1:] != right)
