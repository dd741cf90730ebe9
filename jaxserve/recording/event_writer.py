"""Events to a file, off the engine's thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.recording.events import KEY, AnyEvent, Header

logger = logging.getLogger("jaxserve.recording")

MAX_BYTES = 2 * 2**30  # days of light traffic, or some hours of 64 streams
_WRITE_EVERY_SECONDS = 0.5
_CLOSE_SECONDS = 10.0  # a disk that hangs must not hold up the end

MakeEvent = Callable[[], AnyEvent]


class EventWriter:
    """Appends events to a file. The engine's thread only queues them; a thread of the writer's own encodes and writes.

    A disk that fails, or a file that has grown too large, ends the recording with a warning and stops nothing else.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Make sure that the file can be written; an older recording there is replaced.

        Raises:
          ConfigError: it can't be written, or holds something else than a recording.
        """
        self._path = path
        self._left = max_bytes
        self._pending: deque[MakeEvent] = deque()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="event-writer", daemon=True)
        self._header = b""
        try:
            if path.exists() and not _may_replace(path):
                raise ConfigError(f"{path}: exists, and is not a recording; name another file")
            path.write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"{path}: can't be written ({error.strerror})") from error

    def begin(self, header: Header) -> None:
        """Write the header, and whatever comes from now on."""
        self._header = msgspec.json.encode(header) + b"\n"
        self._writer.start()

    def add(self, make: MakeEvent) -> None:
        """Queue an event; `make` is called in the writer's thread. One thread at a time, after `begin`."""
        if self._left > 0:
            self._pending.append(make)

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._closing.set()
        if self._writer.is_alive():
            self._writer.join(timeout=_CLOSE_SECONDS)

    def _write_on(self) -> None:
        try:
            self._write(self._header)
            while not self._closing.wait(_WRITE_EVERY_SECONDS):
                self._flush()
                if self._left <= 0:
                    logger.warning("%s is full: nothing more is recorded", self._path)
                    self._pending.clear()
                    return
            self._flush()
        except OSError as error:
            self._left = 0
            self._pending.clear()
            logger.warning("%s: nothing more is recorded (%s)", self._path, error.strerror)

    def _flush(self) -> None:
        encode = msgspec.json.encode
        while self._pending and self._left > 0:
            count = min(len(self._pending), 256)
            self._write(b"".join(encode(self._pending.popleft()()) + b"\n" for _ in range(count)))

    def _write(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
        self._left -= len(data)


def _may_replace(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(100)
    return not start or start.startswith(b'{"' + KEY.encode())
