"""The streams, events and pinned memory of the simulated accelerator, with the interface of torch.cuda.

Everything that a kernel does has happened when it is launched; what is simulated is only what may be relied on.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.accelerator.order import DEFAULT, ORDER, Clock

_pinned: dict[int, Tensor] = {}  # by address; never freed


class Stream:
    made = 0

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        Stream.made += 1
        self.name = f"stream {Stream.made}"
        self.priority = priority

    def wait_stream(self, other: "Stream") -> None:
        ORDER.stream_waits(self.name, ORDER.clock(other.name))

    def wait_event(self, event: "Event") -> None:
        ORDER.stream_waits(self.name, event.clock)

    def synchronize(self) -> None:
        WAITS.append("stream")
        ORDER.host_waits(ORDER.clock(self.name))


class DefaultStream(Stream):
    def __init__(self) -> None:
        self.name, self.priority = DEFAULT, 0


class Event:
    """Counts how often the host has to wait; if `query` is true the host knows it from then on."""

    unready = 0  # queries that are false, after which the device is said to have arrived

    def __init__(self) -> None:
        self.clock: Clock = Clock()
        self.queries = 0  # since it was recorded

    def record(self, stream: Stream | None = None) -> None:
        self.clock = ORDER.clock(ORDER.stream if stream is None else stream.name)
        self.queries = 0

    def synchronize(self) -> None:
        WAITS.append("event")
        ORDER.host_waits(self.clock)

    def query(self) -> bool:
        self.queries += 1
        if self.queries <= Event.unready:
            return False
        ORDER.host_waits(self.clock)
        return True


ALLOCATED: dict[int, int] = {}  # bytes of each piece of memory, by its address
WAITS: list[str] = []  # of the host, for a stream or an event


class SimulatedModule:
    """The part of torch.cuda that there is."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {DEFAULT: DefaultStream()}

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._streams[stream.name] = stream
        with ORDER.on(stream.name):
            yield

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._streams[ORDER.stream]

    def default_stream(self, device: torch.device | None = None) -> Stream:
        return self._streams[DEFAULT]

    def get_device_name(self, device: torch.device) -> str:
        return "simulated"

    def mem_get_info(self, device: torch.device | None = None) -> tuple[int, int]:
        return 2**30, 2**30

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Count what kernels allocate from now on; what they free is not known, so that a peak is the sum."""
        ALLOCATED.clear()

    def memory_allocated(self, device: torch.device) -> int:
        return sum(ALLOCATED.values())

    def max_memory_allocated(self, device: torch.device) -> int:
        return sum(ALLOCATED.values())

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


def _pin_memory(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    _pinned[pinned.untyped_storage().data_ptr()] = pinned
    return pinned


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
