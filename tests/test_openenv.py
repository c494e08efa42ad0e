"""Environments behind an OpenEnv server, played here by its documented messages; test_bridges has a real one."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from envs_server.gym import GymPool
from envs_server.openenv import OpenEnv, find
from envs_server.stepping import find_env
from seedrl.errors import ConfigError, EnvFailed
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec
from tests.fakes import make_job

Answer = Callable[[dict[str, Any]], Any]

OPTIONS: dict[str, Any] = {
    "observation": {"count": {"shape": [2]}},
    "action": {"move": {"choices": 3}},
    "truncated": "metadata.late",
}


class Counting:
    """One session: counts its steps, ends after four; the environments of even sessions end by their time limit."""

    opened = 0

    def __init__(self) -> None:
        Counting.opened += 1
        self.number, self.steps = Counting.opened, 0
        self.messages: list[dict[str, Any]] = []

    def __call__(self, message: dict[str, Any]) -> Any:
        self.messages.append(message)
        self.steps = 0 if message["type"] == "reset" else self.steps + 1
        is_over = self.steps == 4
        data = {
            "observation": {"count": [self.number, self.steps], "metadata": {}},
            "reward": float(message["data"]["move"]) if message["type"] == "step" else None,
            "done": is_over,
            "metadata": {"late": is_over and self.number % 2 == 0},
        }
        return {"type": "observation", "data": data}


@contextlib.contextmanager
def served(make: Callable[[], Answer]) -> Iterator[str]:
    """Yield the address of a server that makes an answer per socket, as OpenEnv's makes an environment."""

    def handle(connection: ServerConnection) -> None:
        answer = make()
        for text in connection:
            connection.send(json.dumps(answer(json.loads(text))))

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def env_of(url: str, **options: Any) -> OpenEnv:
    return find(f"openenv:{url}")(**{**OPTIONS, **options})  # type: ignore[return-value]


def test_every_environment_of_a_pool_has_a_socket_and_ends_as_the_server_says() -> None:
    Counting.opened = 0
    with served(Counting) as url:
        pool = GymPool(make_job(4, 2, env_id=f"openenv:{url}", options=OPTIONS), threads=1)
        history: dict[int, list[tuple[int, float, list[float]]]] = {number: [] for number in range(4)}
        while min(map(len, history.values())) < 6:  # one group may be faster than the other
            rows = pool.recv()
            for row, env_id in enumerate(rows.env_id.tolist()):
                assert isinstance(rows.observation, np.ndarray)
                seen = (int(rows.flags[row]), float(rows.reward[row]), rows.observation[row].tolist())
                history[env_id].append(seen)
            pool.send(np.full(2, 2, np.int32), rows.env_id)
        pool.close()
    sessions = {of_one[0][2][0] for of_one in history.values()}
    assert sessions == {1.0, 2.0, 3.0, 4.0}
    for of_one in history.values():
        end = TRUNCATED if of_one[0][2][0] % 2 == 0 else TERMINATED
        flags, rewards, observed = zip(*of_one[:6], strict=True)
        assert flags == (RESET, 0, 0, 0, end, RESET)
        assert rewards == (0, 2, 2, 2, 2, 0)
        assert [count for _, count in observed] == [0, 1, 2, 3, 4, 0]


def test_messages_are_those_that_openenv_documents() -> None:
    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting())
        return made[-1]

    with served(make) as url, contextlib.closing(env_of(url, fixed={"game": "catch"})) as env:
        env.reset(seed=7)
        env.step(np.int32(1))
        env.reset()
    assert made[0].messages == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"game": "catch", "move": 1}},
        {"type": "reset", "data": {}},
    ]


def test_fields_become_spaces_and_nested_ones_are_found_by_dots() -> None:
    def answer(message: dict[str, Any]) -> Any:
        observation = {"board": {"cells": [[0, 1], [2, 0]]}, "turn": 1, "score": 0.5}
        told = message["data"]
        return {"type": "observation", "data": {"observation": observation, "reward": 1, "done": False, "told": told}}

    observation = {
        "board.cells": {"shape": [2, 2], "dtype": "int8"},
        "turn": {"choices": 2},
        "score": {},
    }
    action = {"push": {"low": -2, "high": 2, "shape": [1]}, "jump": {"choices": 2}}
    with served(lambda: answer) as url, contextlib.closing(env_of(url, observation=observation, action=action)) as env:
        assert env.observation_space == {
            "board.cells": ArraySpec((2, 2), "int8"),
            "turn": ArraySpec((), "int64", 2),
            "score": ArraySpec((), "float32"),
        }
        assert env.action_space == {"push": ContinuousSpec((-2.0,), (2.0,), (1,)), "jump": CategoricalSpec((2,), ())}
        seen, _ = env.reset(seed=1)
        assert seen == {"board.cells": [[0, 1], [2, 0]], "turn": 1, "score": 0.5}
        env.step({"push": np.float32([0.5]), "jump": np.int32(1)})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}, "no such move"),
        ([1, 2], r"answered reset with \[1, 2\]"),
        ({"type": "observation", "data": {"observation": {"other": 1}}}, "field count of an answer, .* fields other"),
        ({"type": "observation", "data": {"observation": 3}}, "which has int"),
    ],
    ids=["error", "no object", "no field", "no fields"],
)
def test_answers_of_another_kind_are_failures_that_show_them(answer: Any, words: str) -> None:
    with (
        served(lambda: lambda message: answer) as url,
        contextlib.closing(env_of(url)) as env,
        pytest.raises(EnvFailed, match=words),
    ):
        env.reset(seed=1)


def test_server_that_closes_is_a_failure() -> None:
    def leave(message: dict[str, Any]) -> Any:
        raise EOFError

    with (
        served(lambda: leave) as url,
        contextlib.closing(env_of(url)) as env,
        pytest.raises(EnvFailed, match="did not answer reset"),
    ):
        env.reset()


def test_no_server_is_a_failure_that_names_the_address() -> None:
    with pytest.raises(EnvFailed, match=r"no OpenEnv server at ws://127\.0\.0\.1:1/ws"):
        env_of("ws://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observation": {}}, "env.options.observation: expected the fields"),
        ({"action": {}}, "env.options.action: expected the fields .*choices: 4"),
        ({"observation": {"x": {"size": 3}}}, "env.options.observation.x: expected some of choices, dtype, shape, saw"),
        ({"observation": {"x": {"dtype": "complex64"}}}, "saw complex64"),
        ({"action": {"x": {"low": 1}}}, "expected choices, or low and high"),
        ({"action": {"x": 3}}, "env.options.action.x: expected some of"),
    ],
)
def test_settings_that_do_not_map_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        env_of("ws://127.0.0.1:1", **options)


def test_address_of_another_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected openenv:ws://HOST:PORT"):
        find_env("openenv:http://127.0.0.1:8000")
