"""Step sizes on disk: a running engine records them, `jaxserve plan-buckets` reads them.

JSON lines: a header with the engine's limits, then {"tokens": 67, "seqs": 64} for each step.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.batch.step_sizes import StepLimits, StepSizes
from jaxserve.errors import ConfigError
from jaxserve.line_writer import LineFile, LineWriter

logger = logging.getLogger("jaxserve.steps")

MAX_STEPS = 1_000_000  # about 30 MB, and hours of serving

_VERSION = 1
_KEY = "jaxserve_steps"
_FILE = LineFile(
    what="a recording of steps",
    key=_KEY,
    full="no more steps are recorded",
    failed="steps are no longer recorded",
    every_seconds=1.0,
)


class StepRecorder:
    """Writes the size of every step to a file, up to `max_steps` of them; no step waits for the disk (`LineWriter`)."""

    def __init__(self, path: Path, limits: StepLimits, *, max_steps: int = MAX_STEPS) -> None:
        """Begin a file; an older recording there is replaced.

        Raises:
          ConfigError: it can't be written, or holds something else than a recording.
        """
        header = {
            _KEY: _VERSION,
            "max_num_batched_tokens": limits.max_tokens,
            "max_num_seqs": limits.max_seqs,
        }
        self._lines = LineWriter(
            path, _FILE, logger, header=json.dumps(header).encode() + b"\n", max_lines=max_steps
        )

    def add(self, tokens: int, seqs: int) -> None:
        """Record a step: tokens before a bucket pads them, and sequences. One thread at a time."""
        self._lines.add(partial(_line, tokens, seqs))

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._lines.close()


def _line(tokens: int, seqs: int) -> bytes:
    return b'{"tokens": %d, "seqs": %d}\n' % (tokens, seqs)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A recording.

    Attributes:
      limits: of the engine that was recorded.
      sizes: how many steps had each size.
    """

    limits: StepLimits
    sizes: StepSizes

    @property
    def num_steps(self) -> int:
        return int(self.sizes.total)


def read_trace(path: Path) -> StepTrace:
    """Read a recording. A torn last line (of an engine that was killed) is left out.

    Raises:
      ConfigError: one line that names the file and the line at fault.
    """
    counts: Counter[tuple[int, int]] = Counter()
    limits: StepLimits | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                if limits is None:
                    limits = _header(line, path)
                    continue
                counts[_step(line, limits, f"{path}: line {number}")] += 1
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if limits is None or not counts:
        raise ConfigError(f"{path}: holds no recorded step")
    return StepTrace(limits, StepSizes(dict(counts)))


def _header(line: bytes, path: Path) -> StepLimits:
    value = _object(line)
    if value is None or _KEY not in value:
        raise ConfigError(f"{path}: is not a recording of steps (see --record-steps)")
    limits = value.get("max_num_batched_tokens"), value.get("max_num_seqs")
    if value[_KEY] != _VERSION or not all(type(limit) is int and limit >= 1 for limit in limits):
        raise ConfigError(f"{path}: line 1 is no header that this program reads")
    return StepLimits(*limits)  # type: ignore[arg-type]


def _step(line: bytes, limits: StepLimits, where: str) -> tuple[int, int]:
    value = _object(line)
    if value is None or set(value) != {"tokens", "seqs"}:
        raise ConfigError(f'{where} must be {{"tokens": ..., "seqs": ...}}')
    tokens, seqs = value["tokens"], value["seqs"]
    if not (type(tokens) is int and type(seqs) is int and limits.allow(tokens, seqs)):
        raise ConfigError(
            f"{where}: no step of at most {limits.max_tokens} tokens and {limits.max_seqs} sequences has "
            f"{tokens!r} and {seqs!r}"
        )
    return tokens, seqs


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
