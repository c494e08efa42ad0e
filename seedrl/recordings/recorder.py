"""Records finished unrolls in files, in a thread of its own. Knows nothing of what the unrolls are used for."""

import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

from seedrl.errors import ConfigError
from seedrl.recordings.files import MANIFEST, Content, Manifest, write_shard
from seedrl.recordings.places import Place
from seedrl.run.checkpoint import Tensors
from seedrl.version import __version__

SHARD_BYTES = 32 * 2**20
WAITING = 16  # commits that may wait for the disk; then serving does
LOOK_SECONDS = 1.0  # between looks whether the thread still lives


class UnrollRecorder:
    """`record` belongs to the server thread, `start` and `close` to the main thread, the rest to the thread `dump`."""

    def __init__(
        self,
        directory: Place,
        content: Content,
        algorithm: str,
        *,
        most_bytes: float,
        say: Callable[[str], None],
        on_failure: Callable[[BaseException], None],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Continue a recording of the same content, or begin one. Raises ConfigError if there is another.

        `on_failure` is called if the thread dies; a disk that is full only ends the recording.
        """
        self._directory = directory
        self._most_bytes = most_bytes
        self._shard_bytes = shard_bytes
        self._say = say
        self._on_failure = on_failure
        directory.mkdir(parents=True, exist_ok=True)
        self._manifest = Manifest(content, algorithm, __version__)
        if (directory / MANIFEST).exists():
            self._manifest.shards = Manifest.read(directory).shards
            if Manifest.read(directory).content != content:
                raise ConfigError(f"store.dump: {directory} holds unrolls of other settings; give another directory")
        self._written = 1 + max((int(shard.name[8:14]) for shard in self._manifest.shards), default=-1)
        self._pending: list[Tensors] = []
        self._pending_bytes = 0
        self._queue: queue.Queue[Tensors | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="dump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def record(self, unrolls: Tensors) -> None:
        """Hand finished unrolls over; wait if the disk is behind."""
        self._put(unrolls)

    def close(self, seconds: float) -> bool:
        """Write what is left; return whether that was done in time."""
        self._put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _put(self, unrolls: Tensors | None) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                return self._queue.put(unrolls, timeout=LOOK_SECONDS)

    def _run(self) -> None:
        try:
            self._write_all()
        except BaseException as error:
            self._on_failure(error)

    def _write_all(self) -> None:
        """Write shards until the end. If the disk is full nothing more is recorded, and training continues."""
        is_recording = True
        while (unrolls := self._queue.get()) is not None:
            if is_recording:
                is_recording = self._try(partial(self._add, unrolls))
        if is_recording and self._pending:
            self._try(self._write)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self._say(f"learner: unrolls are no longer recorded in {self._directory}: {error}")
            return False
        return True

    def _add(self, unrolls: Tensors) -> None:
        self._pending.append(unrolls)
        self._pending_bytes += sum(tensor.nbytes for tensor in unrolls.values())
        if self._pending_bytes >= self._shard_bytes:
            self._write()

    def _write(self) -> None:
        """Write a shard, and delete the oldest ones if there is too much."""
        unrolls = {name: torch.cat([each[name] for each in self._pending]) for name in self._pending[0]}
        self._pending, self._pending_bytes = [], 0
        shards = [*self._manifest.shards, write_shard(self._directory, self._written, unrolls)]
        self._written += 1
        old = []
        while len(shards) > 1 and sum(shard.bytes for shard in shards) > self._most_bytes:
            old.append(shards.pop(0))
        self._manifest.shards = shards
        self._manifest.write(self._directory)
        for shard in old:
            with contextlib.suppress(OSError):
                (self._directory / shard.name).unlink()
