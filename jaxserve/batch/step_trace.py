"""Step sizes on disk: a running engine records them, `jaxserve plan-buckets` reads them.

JSON lines: a header with the engine's limits, then {"tokens": 67, "seqs": 64} for each step.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.batch.step_sizes import StepLimits, StepSizes
from jaxserve.errors import ConfigError

logger = logging.getLogger("jaxserve.steps")

MAX_STEPS = 1_000_000  # about 30 MB, and hours of serving

_VERSION = 1
_KEY = "jaxserve_steps"
_WRITE_EVERY_SECONDS = 1.0
_CLOSE_SECONDS = 10.0  # a disk that hangs must not hold up the end


class StepRecorder:
    """Writes the size of every step to a file, up to `max_steps` of them.

    The engine's thread only appends to a queue; a thread of the recorder's own writes, once a second. A disk that
    fails ends the recording with a warning and stops nothing else.
    """

    def __init__(self, path: Path, limits: StepLimits, *, max_steps: int = MAX_STEPS) -> None:
        """Begin a file; an older recording there is replaced.

        Raises:
          ConfigError: it can't be written, or holds something else than a recording.
        """
        self._path = path
        self._left = max_steps
        self._pending: deque[tuple[int, int]] = deque()
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        header = {
            _KEY: _VERSION,
            "max_num_batched_tokens": limits.max_tokens,
            "max_num_seqs": limits.max_seqs,
        }
        try:
            if path.exists() and not _may_replace(path):
                raise ConfigError(f"{path}: exists, and is not a recording of steps; name another file")
            path.write_text(json.dumps(header) + "\n")
        except OSError as error:
            raise ConfigError(f"{path}: can't be written ({error.strerror})") from error

    def add(self, tokens: int, seqs: int) -> None:
        """Record a step: tokens before a bucket pads them, and sequences. One thread at a time."""
        if self._left <= 0:
            return
        self._left -= 1
        self._pending.append((tokens, seqs))
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_on, name="step-recorder", daemon=True)
            self._writer.start()

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._closing.set()
        if self._writer is not None:
            self._writer.join(timeout=_CLOSE_SECONDS)

    def _write_on(self) -> None:
        try:
            while not self._closing.wait(_WRITE_EVERY_SECONDS):
                self._flush()
                if self._left <= 0 and not self._pending:
                    logger.warning("%s is full: no more steps are recorded", self._path)
                    return
            self._flush()
        except OSError as error:
            self._left = 0
            self._pending.clear()
            logger.warning("%s: steps are no longer recorded (%s)", self._path, error.strerror)

    def _flush(self) -> None:
        lines = [
            '{"tokens": %d, "seqs": %d}\n' % self._pending.popleft()  # noqa: UP031 - a tuple
            for _ in range(len(self._pending))
        ]
        if lines:
            with self._path.open("a") as file:
                file.write("".join(lines))


def _may_replace(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.readline(200)
    return not start or start.startswith(b'{"' + _KEY.encode())


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
