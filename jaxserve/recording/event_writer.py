"""Events to a file, off the engine's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxserve.line_writer import LineFile, LineWriter
from jaxserve.recording.events import KEY, AnyEvent, Header

logger = logging.getLogger("jaxserve.recording")

MAX_BYTES = 2 * 2**30  # days of light traffic, or some hours of 64 streams

_FILE = LineFile(
    what="a recording",
    key=KEY,
    full="nothing more is recorded",
    failed="nothing more is recorded",
    every_seconds=0.5,
)

MakeEvent = Callable[[], AnyEvent]


class EventWriter:
    """Appends events to a file (`LineWriter`). The engine's thread only queues them: they are encoded elsewhere."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Make sure that the file can be written; an older recording there is replaced.

        Raises:
          ConfigError: it can't be written, or holds something else than a recording.
        """
        self._lines = LineWriter(path, _FILE, logger, max_bytes=max_bytes)

    def begin(self, header: Header) -> None:
        """The first line."""
        self._lines.add(lambda: _line(header))

    def add(self, make: MakeEvent) -> None:
        """Queue an event; `make` is called in the writer's thread. One thread at a time, after `begin`."""
        self._lines.add(lambda: _line(make()))

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._lines.close()


def _line(content: Header | AnyEvent) -> bytes:
    return msgspec.json.encode(content) + b"\n"
