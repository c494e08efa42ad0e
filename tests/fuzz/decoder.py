"""Everything that reads a peer's bytes, behind one function; and atheris, which looks for bytes that break it.

python -m tests.fuzz.decoder -atheris_runs=1000000 -seed=1

hypothesis calls `feed` as well (tests/test_codec.py). Needs atheris only as a program; `make chaos` installs it.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

import numpy as np

if atheris is not None and __name__ == "__main__":
    with atheris.instrument_imports(include=["seedrl.wire", "seedrl.serving.sessions", "seedrl.serving.lease"]):
        from seedrl.rows import RESET, Rows
        from seedrl.serving.lease import Lease
        from seedrl.serving.sessions import Session
        from seedrl.wire import codec
else:
    from seedrl.rows import RESET, Rows
    from seedrl.serving.lease import Lease
    from seedrl.serving.sessions import Session
    from seedrl.wire import codec

from seedrl.errors import Refused
from seedrl.specs import ArraySpec, EnvSpec, discrete, leaves, tree_map
from seedrl.wire.messages import Act, Command, Control, Hello, Ready, Report, StepParts, Welcome

NUM_ENVS = 4
SPECS = (
    EnvSpec(ArraySpec((2,), "float32"), discrete(3)),
    EnvSpec(ArraySpec((1, 2, 2), "uint8"), discrete(3)),
    EnvSpec({"a": ArraySpec((), "int64", 5), "b": ArraySpec((2,), "float32")}, {"x": discrete(2), "y": discrete(3)}),
)


def feed(data: bytes) -> None:
    """To a learner and to an actor. Whatever is wrong is Refused; anything else that is raised is our mistake."""
    for read in (_as_learner, _as_actor):
        with contextlib.suppress(Refused):
            read(data)


def _as_learner(data: bytes) -> None:
    message = codec.parse_request(data)
    if isinstance(message, StepParts):
        for spec in SPECS:
            _step(message, spec)
    elif isinstance(message, Report):
        _session().measure(message)


def _step(step: StepParts, spec: EnvSpec) -> None:
    try:
        rows = codec.decode_step(step, spec, NUM_ENVS)
        _session().admit(rows, step.buffer)
    except Refused:
        return
    assert len(set(rows.env_id.tolist())) == len(rows.env_id)
    assert set(rows.env_id.tolist()) <= set(range(NUM_ENVS))
    assert all(np.isfinite(leaf).all() for leaf in leaves(rows.observation))
    assert np.isfinite(rows.reward).all()


def _as_actor(data: bytes) -> None:
    message = codec.parse_response(data)
    if isinstance(message, Act):
        codec.decode_act(message, SPECS[0], rows=2)


def _session() -> Session:
    return Session(id=1, hello=Hello(""), lease=Lease(np.arange(NUM_ENVS), np.full(NUM_ENVS, RESET, np.uint8)))


def examples() -> list[bytes]:
    """One good message of each kind, to begin with."""
    requests = [
        Hello("name", "host", "instance", 3, "it broke"),
        Report(1, 0.5, 0.5, 1, 0.5, 0.5, 1),
        *(Ready(spec) for spec in SPECS),
        *(codec.encode_step(1, _rows(spec)) for spec in SPECS),
    ]
    welcome = Welcome(1, "Pong-v5", {"a": 1}, num_envs=4, group_size=2, seed=1)
    responses = [welcome, codec.encode_act([1], np.array([0, 1], np.int32)), Control(Command.END, "why")]
    return [*map(codec.serialize_request, requests), *map(codec.serialize_response, responses)]


def _rows(spec: EnvSpec) -> Rows:
    return Rows(
        env_id=np.array([0, 3], np.int32),
        observation=tree_map(lambda leaf: np.ones((2, *leaf.shape), leaf.dtype), spec.observation),
        reward=np.zeros(2, np.float32),
        flags=np.full(2, RESET, np.uint8),
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for number, example in enumerate(examples()):
            (Path(corpus) / str(number)).write_bytes(example)
        atheris.Setup([*sys.argv, corpus], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
