"""Progress of long work: pulling, converting, loading, compiling, generating.

Code that works calls `progress(what, done, total)`; who shows it, and how, is decided by whoever started the work.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# (what, done, total): `what` names a phase and identifies its bar; `total` 0 means that nobody knows it yet.
# A phase has ended once `done >= total > 0`. May be called from any thread.
Progress = Callable[[str, int, int], None]

_SECONDS_BETWEEN_LINES = 2.0


class NullProgress:
    """Shows nothing."""

    def __call__(self, what: str, done: int, total: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@dataclass(slots=True)
class _Phase:
    started: float
    total: int
    printed_at: float
    printed_tenth: int = 0
    bar: TaskID | None = None


class BarProgress:
    """Bars on a terminal; elsewhere a few plain lines a phase, fit for a log file.

    Use it as a context manager, so that an error leaves the terminal in order. Between phases nothing is held: a
    finished bar stays on the screen as an ordinary line, and what is printed afterwards comes below it.

    Args:
      stream: where to write; stderr by default, so that stdout carries results only.
      interactive: draw bars; None asks the stream whether it is a terminal.
      write_line: told each plain line; None prints it to the stream.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interactive: bool | None = None,
        write_line: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._interactive = self._stream.isatty() if interactive is None else interactive
        self._write = self._print_line if write_line is None else write_line
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._display: RichProgress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            phase = self._phases.get(what)
            is_new = phase is None
            if phase is None:
                phase = self._phases[what] = _Phase(started=now, total=total, printed_at=now)
            phase.total = total
            finished = total > 0 and done >= total
            if self._interactive:
                self._draw(what, phase, done, total)
            else:
                self._print(what, phase, done, total, now, is_new=is_new, finished=finished)
            if finished:
                del self._phases[what]
                if not self._phases:
                    self._stop_display()

    def close(self) -> None:
        """Leave the terminal in order; unfinished bars stay as they are. Can be called twice."""
        with self._lock:
            self._phases.clear()
            self._stop_display()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self, what: str, phase: _Phase, done: int, total: int) -> None:
        if self._display is None:
            self._display = _make_display(self._stream)
            self._display.start()
        count = _count(done, total)
        if phase.bar is None:
            phase.bar = self._display.add_task(what, total=total or None, completed=done, count=count)
        else:
            self._display.update(phase.bar, total=total or None, completed=done, count=count)

    def _stop_display(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _print(
        self, what: str, phase: _Phase, done: int, total: int, now: float, *, is_new: bool, finished: bool
    ) -> None:
        if finished:
            # Phases of a blink get one line, not a beginning and an end.
            self._write(f"{what}: {_count(done, total)} in {now - phase.started:.1f} s")
            return
        tenth = 10 * done // total if total > 0 else 0
        waited = now - phase.printed_at >= _SECONDS_BETWEEN_LINES
        if is_new:
            phase.printed_tenth = tenth
            self._write(f"{what} ...")
        elif tenth > phase.printed_tenth and waited:
            phase.printed_tenth, phase.printed_at = tenth, now
            self._write(f"{what}: {10 * tenth}% ({_count(done, total)})")

    def _print_line(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _make_display(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    # File names may hold square brackets, so nothing is parsed as markup.
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream, force_terminal=True),
    )


def _count(done: int, total: int) -> str:
    return f"{_short(done)}/{_short(total)}" if total > 0 else _short(done)


def _short(number: int) -> str:
    """1234567 -> "1.2M": byte counts and step counts share one column."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
