"""The places of the leaves of observations in a shared buffer. Knows nothing of messages or shared memory."""

from seedrl.specs import EnvSpec

ALIGNED = 64  # bytes: every leaf begins at a multiple of this


def shared_bytes(spec: EnvSpec, n: int) -> int:
    """Return the bytes that the observations of n rows take."""
    *_, last = _places(spec, n)
    return int(last.stop)


def shared_leaves(buffer: memoryview, spec: EnvSpec, n: int) -> list[memoryview]:
    """Return the part of a buffer that holds each leaf of n rows."""
    return [buffer[place] for place in _places(spec, n)]


def _places(spec: EnvSpec, n: int) -> list[slice]:
    places, at = [], 0
    for leaf in spec.observations:
        places.append(slice(at, at + n * leaf.nbytes))
        at = -(-places[-1].stop // ALIGNED) * ALIGNED
    return places
