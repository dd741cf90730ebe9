"""A recording, read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.recording.events import KEY, VERSION, AnyEvent, Header


@dataclass(frozen=True, slots=True)
class Recording:
    """A file whose header has been read."""

    path: Path
    header: Header

    def events(self) -> Iterator[AnyEvent]:
        """Its events, read as they are asked for. A torn last line (of an engine that was killed) is left out.

        Raises:
          ConfigError: one line that names the file and the line at fault.
        """
        decoder = msgspec.json.Decoder(AnyEvent)
        expected = 0
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    return
                try:
                    event = decoder.decode(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"{self.path}: line {number}: {' '.join(str(error).split())}"
                    ) from error
                if event.number != expected:
                    raise ConfigError(
                        f"{self.path}: line {number} is event {event.number}, but {expected} was due: lines are missing"
                    )
                expected += 1
                yield event


def open_recording(path: Path) -> Recording:
    """Read the header of a recording.

    Raises:
      ConfigError: one line that names the file, and what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not line.startswith(b'{"' + KEY.encode()) or not line.endswith(b"\n"):
        raise ConfigError(f"{path}: is not a recording (see --record of serve)")
    try:
        version = msgspec.json.decode(line)[KEY]
        if version != VERSION:
            raise ConfigError(f"{path}: line 1: version {version!r} of the format is not known here")
        return Recording(path, msgspec.json.decode(line, type=Header))
    except ValueError as error:  # msgspec's are; a ConfigError is raised again as it is
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: line 1: {' '.join(str(error).split())}") from error
