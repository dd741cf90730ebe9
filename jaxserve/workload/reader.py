"""Reading a workload, whichever of the known formats its file has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.workload.public_traces import AZURE_COLUMNS, parse_azure, parse_mooncake
from jaxserve.workload.token_lists import parse_token_lists
from jaxserve.workload.traced_request import Workload
from jaxserve.workload.workload_file import KEY, parse_workload


def read_workload(path: Path, *, limit: int | None = None) -> Workload:
    """Read a workload of our own (`write_workload`, or a JSON list), Azure's CSV or Mooncake's JSON lines.

    Args:
      limit: keep the first so many requests; what is behind them is not read, except in a JSON list.

    Raises:
      ConfigError: one line that names the file, and the line or request at fault.
    """
    try:
        with path.open("rb") as file:
            start = file.readline().lstrip(b"\xef\xbb\xbf")
            if start.startswith(AZURE_COLUMNS[0].encode()):
                parse, skipped = parse_azure, 1
            elif start.startswith(b"{") and KEY.encode() in start:
                parse, skipped = parse_workload, 1
            elif start.startswith(b"{") and b"hash_ids" in start:
                parse, skipped = parse_mooncake, 0
            else:
                workload = parse_token_lists(start + file.read(), path)
                return Workload(workload.name, workload.requests[:limit])
            workload = parse(_numbered(start, file, None if limit is None else limit + skipped), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not workload.requests:
        raise ConfigError(f"{path}: holds no request")
    return workload


def _numbered(first: bytes, rest: Iterator[bytes], limit: int | None) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1."""
    taken = 1
    yield 1, first
    for number, line in enumerate(rest, start=2):
        if taken == limit:
            return
        if line.strip():
            taken += 1
            yield number, line
