"""The first rows of environments: what is wrong with them is said in a sentence, before anything travels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from envs_server.first_rows import FIRST_STEPS, FirstRows
from envs_server.stepping import Envs
from seedrl.errors import EnvFailed
from seedrl.rows import Rows
from seedrl.specs import ArraySpec, discrete
from tests.fakes import FakePool, make_job, make_spec
from tests.simulators import Counter

SPEC = make_spec()
PLACE = r"^tests/test_first_rows\.py:\d+ in <lambda>: "  # of the method that is wrong


def rows(**changes: Any) -> Rows:
    good = Rows(np.arange(4, dtype=np.int32), np.zeros((4, 2), "float32"), np.zeros(4, "float32"), np.zeros(4, "uint8"))
    return good._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"observation": np.zeros((4, 3), "float32")},
            r"^observation: expected float32\[4, 2\], .*, saw float32\[4, 3\]$",
        ),
        ({"observation": np.zeros((4, 2))}, r"saw float64\[4, 2\]$"),
        ({"observation": np.full((4, 2), np.nan, "float32")}, "^observation: expected finite numbers, saw nan$"),
        (
            {"observation": {"eye": np.zeros((4, 2), "float32")}},
            r"^observation: expected the leaves \[''\], saw \['eye'\]$",
        ),
        ({"reward": np.array([0, 1, np.inf, 2], "float32")}, "^reward: expected finite numbers, saw inf$"),
        ({"reward": np.zeros((4, 1), "float32")}, r"^reward: expected float32\[4\], .*, saw float32\[4, 1\]$"),
        ({"flags": np.full(4, 17, "uint8")}, "^flags: expected 4 sums of 1, 2, 4 and 8, saw"),
        ({"env_id": np.arange(1, 5, dtype=np.int32)}, r"^env_id: expected numbers from 0 to 3, saw \[1, 2, 3, 4\]$"),
    ],
)
def test_first_rows_that_differ_from_the_spec_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvFailed, match=words):
        FirstRows(SPEC, 4).check(rows(**changes))


def test_first_rows_category_below_zero_is_named() -> None:
    spec = replace(SPEC, observation=ArraySpec((), "int32", values=6))
    categories = np.array([0, 5, -1, 2], "int32")
    with pytest.raises(EnvFailed, match=r"^observation: expected categories from 0 to 5, saw -1$"):
        FirstRows(spec, 4).check(rows(observation=categories))


def test_first_rows_are_over_after_some_steps_of_each_environment() -> None:
    pool = FakePool(make_job())
    first = FirstRows(pool.spec, 4)
    for _ in range(FIRST_STEPS):
        assert not first.are_over
        received = pool.recv()
        first.check(received)
        pool.send(np.zeros(4, np.int32), received.env_id)
    assert first.are_over
    first.check(rows(reward=np.full(4, np.nan, "float32")))  # the learner's business from here on


# Environments with Gymnasium's interface.


def broken(**members: Any) -> type[Counter]:
    return type("Mine", (Counter,), members)


def step(kind: type[Counter]) -> None:
    Envs(kind, {}, [1]).step(np.zeros(1, np.int32))


def test_step_of_the_old_interface_is_named() -> None:
    kind = broken(step=lambda self, action: ([0, 0, 0], 0.0, False, {}))
    with pytest.raises(
        EnvFailed, match=PLACE + r"step must return .*; it returned 4 values \(.*the interface of old Gym"
    ):
        step(kind)


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        (
            lambda self, seed=None: np.zeros(3),
            PLACE + r"reset must return \(observation, info\) .*; it returned float64\[3\]$",
        ),
        (
            lambda self: (np.zeros(3), {}),
            PLACE + r"reset must take seed=…, as in Gymnasium: .*unexpected keyword argument 'seed'",
        ),
    ],
    ids=["old interface", "no seed"],
)
def test_reset_of_another_interface_is_named(reset: Any, words: str) -> None:
    with pytest.raises(EnvFailed, match=words):
        step(broken(reset=reset))


def test_type_error_inside_reset_is_not_taken_for_another_interface() -> None:
    def reset(self: Any, seed: int | None = None) -> Any:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        step(broken(reset=reset))


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (ArraySpec((2,), "float32"), np.zeros(3), PLACE + r"observation: expected float32\[2\], .*, saw float64\[3\]$"),
        (ArraySpec((2,), "float32"), [0.0, np.nan], PLACE + "observation: expected finite numbers, saw nan$"),
        (
            ArraySpec((2,), "uint8"),
            [0.5, 1.0],
            PLACE + r"observation: expected uint8\[2\], .*, saw 0\.5, which that cannot hold$",
        ),
        (ArraySpec((), "uint8"), 256, r"saw 256, which that cannot hold$"),
        (discrete(3), 3, PLACE + "observation: expected categories from 0 to 2, saw 3$"),
        (ArraySpec((2,), "float32"), ["a", "b"], PLACE + r"observation: expected float32\[2\], .*, saw <U1\[2\]$"),
        (ArraySpec((2,), "float32"), [[1], [2, 3]], "saw no array$"),
        (
            {"eye": ArraySpec((2,), "float32")},
            {"ear": [0, 0]},
            PLACE + r"observation eye: expected float32\[2\], .*, saw none$",
        ),
    ],
)
def test_observation_that_differs_from_its_space_is_named(space: Any, observation: Any, words: str) -> None:
    kind = broken(observation_space=space, reset=lambda self, seed=None: (observation, {}))
    with pytest.raises(EnvFailed, match=words):
        step(kind)


def test_observation_of_the_same_numbers_in_another_shape_or_type_is_taken() -> None:
    kind = broken(observation_space=ArraySpec((2,), "uint8"), reset=lambda self, seed=None: ([[1.0], [255]], {}))
    assert Envs(kind, {}, [1]).first().observation.tolist() == [[1, 255]]


def test_reward_that_is_not_one_number_is_named() -> None:
    kind = broken(step=lambda self, action: ([0, 0, 0], np.zeros(2), False, False, {}))
    with pytest.raises(EnvFailed, match=PLACE + r"the reward must be one number; step returned float64\[2\]$"):
        step(kind)
