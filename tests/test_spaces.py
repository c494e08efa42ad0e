"""Spaces against gymnasium's own: every sample travels as a tree and comes back as it was."""

from collections import namedtuple
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from seedrl.errors import ConfigError
from seedrl.specs import Arrays, ArraySpec, CategoricalSpec, ContinuousSpec, discrete, tree_map

SAMPLES = 20
BOX = spaces.Box(-1, 1, (2, 3))
NESTED = spaces.Dict(
    {
        "camera": spaces.Dict({"left": spaces.Box(0, 255, (4, 5), np.uint8), "right": BOX}),
        "arm": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(4)]),
    }
)
NUMBERS = ContinuousSpec((-1.0,) * 6, (1.0,) * 6, (2, 3))

OBSERVATIONS: list[tuple[Any, Any]] = [
    (BOX, ArraySpec((2, 3), "float32")),
    (spaces.Box(-np.inf, np.inf, (3,), np.float64), ArraySpec((3,), "float64")),
    (spaces.Box(-5, 5, (), np.int16), ArraySpec((), "int16")),
    (spaces.Box(0, 60_000, (2,), np.uint16), ArraySpec((2,), "int32")),
    (spaces.Box(0, 2**32 - 1, (2,), np.uint32), ArraySpec((2,), "int64")),
    (spaces.Discrete(6), ArraySpec((), "int64", 6)),
    (spaces.Discrete(6, start=-2), ArraySpec((), "int64", 6)),
    (spaces.MultiDiscrete([3, 7]), ArraySpec((2,), "int64", 7)),
    (spaces.MultiDiscrete([[3, 7], [2, 2]], start=[[1, 0], [0, -4]]), ArraySpec((2, 2), "int64", 7)),
    (spaces.MultiBinary(5), ArraySpec((5,), "int8")),
    (spaces.MultiBinary([2, 3]), ArraySpec((2, 3), "int8")),
    (
        NESTED,
        {
            "arm/0": ArraySpec((), "int64", 3),
            "arm/1": ArraySpec((4,), "int8"),
            "camera/left": ArraySpec((4, 5), "uint8"),
            "camera/right": ArraySpec((2, 3), "float32"),
        },
    ),
    (spaces.Tuple([BOX]), {"0": ArraySpec((2, 3), "float32")}),
]
ACTIONS: list[tuple[Any, Any]] = [
    (spaces.Discrete(4), discrete(4)),
    (spaces.Discrete(4, start=10), discrete(4)),
    (spaces.MultiDiscrete([3, 7]), CategoricalSpec((3, 7), (2,))),
    (spaces.MultiDiscrete([[3, 7], [2, 2]], start=[[1, 0], [0, -4]]), CategoricalSpec((3, 7, 2, 2), (2, 2))),
    (spaces.MultiBinary([2, 3]), CategoricalSpec((2,) * 6, (2, 3))),
    (BOX, NUMBERS),
    (spaces.Box(-1, 1, (2, 3), np.float64), NUMBERS),
    (
        spaces.Tuple([spaces.Discrete(3), spaces.Dict({"b": BOX, "a": spaces.MultiBinary(2)})]),
        {"0": discrete(3), "1/a": CategoricalSpec((2, 2), (2,)), "1/b": NUMBERS},
    ),
]
# Spaces without gymnasium, and those of gymnasium that say the same.
OWN: list[tuple[Any, Any]] = [
    (ArraySpec((2, 3), "float32"), BOX),
    (ArraySpec((2,), "uint8"), spaces.Box(0, 255, (2,), np.uint8)),
    (discrete(6), spaces.Discrete(6, dtype=np.int32)),
    (CategoricalSpec((3, 7), (2,)), spaces.MultiDiscrete([3, 7], dtype=np.int32)),
    (NUMBERS, BOX),
    (
        {"eye": ArraySpec((2, 3), "float32"), "arm": (discrete(2), {"x": NUMBERS})},
        spaces.Dict({"eye": BOX, "arm": spaces.Tuple([spaces.Discrete(2, dtype=np.int32), spaces.Dict({"x": BOX})])}),
    ),
]


def samples(space: Any, count: int = SAMPLES) -> list[Any]:
    space.seed(3)
    return [space.sample() for _ in range(count)]


def assert_fits(arrays: Arrays, spec: Any, count: int) -> None:
    """Shapes, types, contiguity, the order of leaves and the range of categories."""
    pairs = zip(arrays.values(), spec.values(), strict=True) if isinstance(arrays, dict) else [(arrays, spec)]
    assert not isinstance(arrays, dict) or list(arrays) == list(spec) == sorted(spec)
    for array, leaf in pairs:
        assert (array.shape, array.dtype.name) == ((count, *leaf.shape), leaf.dtype)
        assert array.flags.c_contiguous
        assert not leaf.values or (array.min() >= 0 and array.max() < leaf.values)


def words(space: Any) -> str:
    return str(space)[:40]


@pytest.mark.parametrize(("space", "spec"), OBSERVATIONS, ids=words)
def test_observations_one_by_one_fit_the_spec(space: Any, spec: Any) -> None:
    known = ObservationSpace(space)
    assert known.spec == spec
    assert_fits(known.stacked(samples(space)), spec, SAMPLES)


@pytest.mark.parametrize(("space", "spec"), OBSERVATIONS, ids=words)
def test_observations_of_many_at_once_equal_those_one_by_one(space: Any, spec: Any) -> None:
    """As a vector environment gives them, nested, each leaf [n, ...]."""
    found = samples(space)
    together = gymnasium.vector.utils.concatenate(
        space, found, gymnasium.vector.utils.create_empty_array(space, SAMPLES)
    )
    known = ObservationSpace(space)
    many, single = known.rows(together, SAMPLES), known.stacked(found)
    assert_fits(many, spec, SAMPLES)
    for one, other in zip(leaves_of(many), leaves_of(single), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("space", "spec"), ACTIONS, ids=words)
def test_actions_come_back_as_members_of_their_space(space: Any, spec: Any) -> None:
    known = ActionSpace(space)
    assert known.spec == spec
    generator = np.random.default_rng(5)
    for _ in range(SAMPLES):
        assert space.contains(known.nested(tree_map(lambda leaf: random_action(leaf, generator), known.spec)))


@pytest.mark.parametrize(("space", "spec"), ACTIONS, ids=words)
def test_actions_of_many_equal_those_one_by_one(space: Any, spec: Any) -> None:
    known = ActionSpace(space)
    generator = np.random.default_rng(5)
    single = [tree_map(lambda leaf: random_action(leaf, generator), known.spec) for _ in range(4)]
    many = known.nested(
        {name: np.stack([one[name] for one in single]) for name in spec} if isinstance(spec, dict) else np.stack(single)
    )
    batched = gymnasium.vector.utils.batch_space(space, 4)
    if not isinstance(spec, dict):
        np.testing.assert_array_equal(many, np.stack([known.nested(one) for one in single]))
        assert many.dtype == batched.dtype


@pytest.mark.parametrize(
    "space", [spaces.Discrete(5, start=3), spaces.MultiDiscrete([3, 4], start=[1, 2]), spaces.MultiBinary(3)], ids=words
)
def test_categories_there_and_back_are_the_same(space: Any) -> None:
    for sample in samples(space):
        row = ObservationSpace(space).stacked([sample])
        assert not isinstance(row, dict)
        np.testing.assert_array_equal(ActionSpace(space).nested(row[0].astype(np.int32)), sample)


def test_action_with_bounds_that_were_rounded_is_within_them() -> None:
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)
    assert np.float64(np.float32(0.1)) > 0.1
    assert space.contains(ActionSpace(space).nested(np.array([0.1], np.float32)))


def test_action_may_be_written_to_by_the_environment() -> None:
    read_only = np.frombuffer(np.ones(6, np.float32).tobytes(), np.float32).reshape(2, 3)
    ActionSpace(BOX).nested(read_only)[0, 0] = 0.0


@pytest.mark.parametrize(("own", "space"), OWN, ids=lambda value: words(value))
def test_spaces_of_specs_say_the_same_as_gymnasiums(own: Any, space: Any) -> None:
    known, other = ObservationSpace(own), ObservationSpace(space)
    assert known.spec == other.spec
    for one, same in zip(*(leaves_of(kind.stacked(samples(space))) for kind in (known, other)), strict=True):
        np.testing.assert_array_equal(one, same)


def test_spaces_of_specs_as_actions_are_themselves() -> None:
    arm = {"grip": discrete(2), "move": NUMBERS}
    known = ActionSpace((discrete(3), arm))
    assert known.spec == {"0": discrete(3), "1/grip": discrete(2), "1/move": NUMBERS}
    moved = np.zeros((2, 3), np.float32)
    first, second = known.nested({"0": np.int32(2), "1/grip": np.int32(1), "1/move": moved})
    assert (first, second["grip"], second["move"].tolist()) == (2, 1, moved.tolist())


def test_named_tuples_are_read_by_name() -> None:
    Pair = namedtuple("Pair", "b a")
    rows = ObservationSpace(spaces.Dict({"a": BOX, "b": spaces.Discrete(2)})).rows(Pair([1], np.ones((1, 2, 3))), 1)
    assert isinstance(rows, dict)
    assert rows["b"].tolist() == [1]


@pytest.mark.parametrize(
    ("observation", "action", "why"),
    [
        (spaces.Text(5), spaces.Discrete(2), "Text of str"),
        (spaces.Sequence(BOX), spaces.Discrete(2), "Sequence of no type is none of Box"),
        (spaces.Box(0, 1, (1,), np.uint64), spaces.Discrete(2), "Box of uint64 is none of"),
        (spaces.Dict({}), spaces.Discrete(2), r"different names, one of them at least, and are \[\]"),
        (spaces.Dict({"a/b": BOX, "a": spaces.Dict({"b": BOX})}), spaces.Discrete(2), r"are \['a/b', 'a/b'\]"),
        (ArraySpec((2,), "complex64"), discrete(2), "ArraySpec of complex64"),
        (BOX, spaces.Box(0, 9, (2,), np.int32), "actions of Box of int32 are none of"),
        (BOX, ArraySpec((2,), "float32"), "actions of ArraySpec of float32 are none of"),
        (BOX, None, "actions of NoneType of no type"),
    ],
)
def test_space_that_cannot_be_streamed_is_refused_by_name(observation: Any, action: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^Mine has observations of .*{why}"):
        spec_of(observation, action, "Mine")


def leaves_of(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def random_action(leaf: Any, generator: np.random.Generator) -> Any:
    if isinstance(leaf, ContinuousSpec):
        return generator.uniform(-1, 1, leaf.shape).astype(np.float32)
    return np.array([generator.integers(size) for size in leaf.sizes], np.int32).reshape(leaf.shape)
