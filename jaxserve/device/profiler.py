"""jax.profiler: traces of what host and device do, to be looked at with XProf, TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax


def start_trace(folder: Path) -> None:
    """Begin to record; the files come into `folder` at the end. One trace at a time in a process.

    Raises:
      RuntimeError: one is under way.
    """
    jax.profiler.start_trace(str(folder))


def stop_trace() -> None:
    """End it, and write it. Takes as long as the trace is large.

    Raises:
      RuntimeError: none is under way.
    """
    jax.profiler.stop_trace()
