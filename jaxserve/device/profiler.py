"""jax.profiler: traces of what host and device do, to be looked at with XProf, TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax


class JaxProfiler:
    """Records one trace at a time, which is all that a process can."""

    def __init__(self) -> None:
        self._is_unwritten = (
            False  # a trace has ended and could not be written; jax begins no other before it is
        )

    def start(self, folder: Path) -> None:
        """Begin to record; the files come into `folder` at the end.

        Raises:
          RuntimeError: one is under way, or one before could not be written, and still can't be.
        """
        if self._is_unwritten:
            self.stop()
        jax.profiler.start_trace(str(folder))

    def stop(self) -> None:
        """End it, and write it. Takes as long as the trace is large.

        Raises:
          RuntimeError: none is under way, or it can't be written.
        """
        self._is_unwritten = True
        jax.profiler.stop_trace()
        self._is_unwritten = False
