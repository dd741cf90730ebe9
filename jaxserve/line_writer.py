"""Lines to a file, off the thread that has them to tell."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError

_CLOSE_SECONDS = 10.0  # a disk that hangs must not hold up the end
_AT_ONCE = 256  # lines made and written together

MakeLine = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class LineFile:
    """What a file of lines is.

    Attributes:
      what: as errors call it: "a recording", ...
      key: every such file begins with `{"key`; an older one is replaced, anything else is not.
      full, failed: what a warning says becomes of it when it may grow no more, and when the disk fails.
      every_seconds: how long a line may wait to be written.
    """

    what: str
    key: str
    full: str
    failed: str
    every_seconds: float


class LineWriter:
    """Appends lines. Whoever has one only queues it; a thread of the writer's own makes and writes it.

    A disk that fails, or a file that may grow no more, ends the file with a warning and stops nothing else.
    """

    def __init__(
        self,
        path: Path,
        kind: LineFile,
        logger: logging.Logger,
        *,
        header: bytes = b"",
        max_lines: int = sys.maxsize,
        max_bytes: int = sys.maxsize,
    ) -> None:
        """Begin the file, with `header`.

        Args:
          max_lines: behind the header.

        Raises:
          ConfigError: it can't be written, or holds something else.
        """
        self._path = path
        self._kind = kind
        self._logger = logger
        self._lines_left = max_lines
        self._bytes_left = max_bytes
        self._pending: deque[MakeLine] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            if path.exists() and not _may_replace(path, kind.key):
                raise ConfigError(f"{path}: exists, and is not {kind.what}; name another file")
            path.write_bytes(header)
        except OSError as error:
            raise ConfigError(f"{path}: can't be written ({error.strerror})") from error

    def add(self, make: MakeLine) -> None:
        """Queue a line; `make` is called in the writer's thread. One thread at a time."""
        if self._lines_left <= 0 or self._bytes_left <= 0:
            return
        self._lines_left -= 1
        self._pending.append(make)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="line-writer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_SECONDS)

    def _write_on(self) -> None:
        try:
            while not self._closing.wait(self._kind.every_seconds):
                self._flush()
                if self._bytes_left <= 0 or (self._lines_left <= 0 and not self._pending):
                    self._logger.warning("%s is full: %s", self._path, self._kind.full)
                    self._pending.clear()
                    return
            self._flush()
        except OSError as error:
            self._lines_left = 0
            self._pending.clear()
            self._logger.warning("%s: %s (%s)", self._path, self._kind.failed, error.strerror)

    def _flush(self) -> None:
        while self._pending and self._bytes_left > 0:
            count = min(len(self._pending), _AT_ONCE)
            data = b"".join(self._pending.popleft()() for _ in range(count))
            with self._path.open("ab") as file:
                file.write(data)
            self._bytes_left -= len(data)


def _may_replace(path: Path, key: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(200)
    return not start or start.startswith(b'{"' + key.encode())
