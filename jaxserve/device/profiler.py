"""jax.profiler: traces of what host and device do, to be looked at with XProf, TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

_is_unwritten = False  # a trace has ended and could not be written; jax begins no other before it is


def start_trace(folder: Path) -> None:
    """Begin to record; the files come into `folder` at the end. One trace at a time in a process.

    Raises:
      RuntimeError: one is under way, or one before could not be written, and still can't be.
    """
    if _is_unwritten:
        stop_trace()
    jax.profiler.start_trace(str(folder))


def stop_trace() -> None:
    """End it, and write it. Takes as long as the trace is large.

    Raises:
      RuntimeError: none is under way, or it can't be written.
    """
    global _is_unwritten
    _is_unwritten = True
    jax.profiler.stop_trace()
    _is_unwritten = False
