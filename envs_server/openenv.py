"""Environments behind an OpenEnv server, one per WebSocket, with Gymnasium's interface. Knows nothing of pools.

OpenEnv (github.com/meta-pytorch/OpenEnv) sends JSON and describes no shapes, so `env.options` maps the fields of its
messages to spaces:

    observation: {board: {shape: [9], dtype: int8}, turn: {choices: 2}}   # field → array, or category
    action: {cell: {choices: 9}}                                          # field → choice, or {low, high, shape}
    truncated: metadata.truncated                                         # where an answer tells it; "" if it does not
    fixed: {game: tic_tac_toe}                                            # fields that every action has

A field in a nested object is named with dots. One field alone is a plain space, several are a dict.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from seedrl.errors import ConfigError, EnvFailed
from seedrl.specs import DTYPES, ActionSpec, Arrays, ArraySpec, CategoricalSpec, ContinuousSpec

OPENENV = "openenv"
MAX_BYTES = 64 * 1024 * 1024  # of an answer
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0

Fields = Mapping[str, Mapping[str, Any]]  # name of a field → its space


def is_openenv(env_id: str) -> bool:
    """Return whether an environment is behind an OpenEnv server."""
    return env_id.startswith(f"{OPENENV}:")


class OpenEnv:
    """One environment on a server, for as long as its socket is open. Owned by one thread."""

    def __init__(
        self,
        url: str,
        *,
        observation: Fields,
        action: Fields,
        truncated: str = "",
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.observation_space = _plain({name: _array(name, each) for name, each in observation.items()})
        self.action_space = _plain({name: _action(name, each) for name, each in action.items()})
        self._observed = tuple(observation)
        self._acted = next(iter(action))  # the only field, unless actions are dicts
        self._truncated = truncated
        self._fixed = dict(fixed or {})
        self._url = url
        self._until_closed = contextlib.ExitStack()
        self._socket = self._until_closed.enter_context(_connected(url))

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        answer = self._ask("reset", {} if seed is None else {"seed": seed})
        return self._observation(answer), {}

    def step(self, action: Arrays) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = action if isinstance(action, dict) else {self._acted: action}
        fields = {name: np.asarray(value).tolist() for name, value in chosen.items()}
        answer = self._ask("step", {**self._fixed, **fields})
        truncated = bool(self._truncated and _found(answer, self._truncated, default=False))
        terminated = bool(answer.get("done")) and not truncated
        reward = answer.get("reward")
        return self._observation(answer), 0.0 if reward is None else reward, terminated, truncated, {}

    def close(self) -> None:
        self._until_closed.close()

    def _observation(self, answer: dict[str, Any]) -> Any:
        values = {name: _found(answer.get("observation"), name) for name in self._observed}
        return values if len(values) > 1 else next(iter(values.values()))

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer. Raises EnvFailed for every other answer."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=ANSWER_SECONDS))
        except (OSError, EOFError, ValueError, _closed()) as error:
            raise EnvFailed(f"{self._url} did not answer {kind}: {error!r}") from error
        told = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(told, dict) or answer.get("type") != "observation":
            raise EnvFailed(f"{self._url} answered {kind} with {json.dumps(answer)[:300]}")
        return told


def find(env_id: str) -> partial[OpenEnv]:
    """Return what makes an environment of `openenv:ws://HOST:PORT`, called with env.options."""
    url = env_id.partition(":")[2]
    if not url.startswith(("ws://", "wss://")):
        raise ConfigError(f"env.id={env_id}: expected {OPENENV}:ws://HOST:PORT or {OPENENV}:wss://HOST:PORT")
    return partial(_made, url if url.rstrip("/").endswith("/ws") else f"{url.rstrip('/')}/ws")


def _made(url: str, **options: Any) -> OpenEnv:
    missing = [name for name in ("observation", "action") if not options.get(name)]
    if missing:
        example = "{move: {choices: 4}}" if missing[0] == "action" else "{position: {shape: [2]}}"
        raise ConfigError(
            f"env.options.{missing[0]}: expected the fields of OpenEnv's messages and their spaces, saw none; "
            f"for example {missing[0]}: {example}"
        )
    return OpenEnv(url, **options)


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Any]:
    """Yield a socket that is closed at the end."""
    try:
        from websockets.sync.client import connect
    except ImportError as error:
        raise ConfigError(f"env.id={OPENENV}:… needs websockets: pip install 'seedrl[{OPENENV}]'") from error
    with contextlib.ExitStack() as until_closed:
        try:
            opened = connect(url, max_size=MAX_BYTES, open_timeout=CONNECT_SECONDS, compression=None, proxy=None)
            socket = until_closed.enter_context(opened)
        except (OSError, _closed()) as error:
            raise EnvFailed(f"there is no OpenEnv server at {url}: {error}") from error
        yield socket


def _closed() -> type[Exception]:
    """Return the class of websockets' own errors."""
    from websockets.exceptions import WebSocketException

    return WebSocketException


def _found(value: Any, path: str, **otherwise: Any) -> Any:
    """Return the value at a dotted path. Raises EnvFailed if there is none, unless there is a default."""
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            if otherwise:
                return otherwise["default"]
            seen = f"the fields {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
            raise EnvFailed(f"env.options names the field {path} of an answer, which has {seen}")
        value = value[name]
    return value


def _plain(spaces: dict[str, Any]) -> Any:
    return spaces if len(spaces) > 1 else next(iter(spaces.values()))


def _array(name: str, field: Mapping[str, Any]) -> ArraySpec:
    _expect_keys("observation", name, field, {"shape", "dtype", "choices"})
    choices = int(field.get("choices", 0))
    dtype = str(field.get("dtype", "int64" if choices else "float32"))
    if dtype not in DTYPES:
        raise ConfigError(f"env.options.observation.{name}.dtype: expected one of {', '.join(DTYPES)}, saw {dtype}")
    return ArraySpec(tuple(map(int, field.get("shape", ()))), dtype, choices)


def _action(name: str, field: Mapping[str, Any]) -> ActionSpec:
    _expect_keys("action", name, field, {"choices", "low", "high", "shape"})
    shape = tuple(map(int, field.get("shape", ())))
    size = int(np.prod(shape))
    if "choices" in field:
        return CategoricalSpec((int(field["choices"]),) * size, shape)
    if not {"low", "high"} <= field.keys():
        raise ConfigError(f"env.options.action.{name}: expected choices, or low and high, saw {dict(field)}")
    low, high = (np.broadcast_to(np.asarray(field[key], float), shape).ravel() for key in ("low", "high"))
    return ContinuousSpec(tuple(low.tolist()), tuple(high.tolist()), shape)


def _expect_keys(kind: str, name: str, field: Any, known: set[str]) -> None:
    unknown = sorted(set(field) - known) if isinstance(field, Mapping) else [str(field)]
    if unknown:
        raise ConfigError(f"env.options.{kind}.{name}: expected some of {', '.join(sorted(known))}, saw {unknown[0]}")
