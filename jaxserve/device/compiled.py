"""The executable set: one compiled program for each known signature, and a refusal for any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax

from jaxserve.progress import Progress

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class ExecutableSet[Key: Hashable]:
    """Programs by key. After `build` nothing is ever traced or compiled again.

    Args:
      make_one: loads the program of a key, or else traces, lowers and compiles it.
    """

    def __init__(self, make_one: Callable[[Key], Any]) -> None:
        self._make_one = make_one
        self._executables: dict[Key, Any] = {}

    def build(self, keys: Iterable[Key], *, threads: int, progress: Progress, what: str) -> None:
        """Make every program that is missing, `threads` at a time (XLA compiles outside Python's lock)."""
        missing = [key for key in keys if key not in self._executables]
        progress(what, 0, len(missing))
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="compile") as pool:
            futures = {pool.submit(self._make_one, key): key for key in missing}
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    self._executables[futures[future]] = future.result()
                    progress(what, done, len(missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def __getitem__(self, key: Key) -> Any:
        """The program of `key`.

        Raises:
          LookupError: it was not built. In traffic a compile is an error, never something to wait for.
        """
        if key not in self._executables:
            raise LookupError(f"no executable for {key}; compiled are {sorted(map(str, self._executables))}")
        return self._executables[key]

    def __len__(self) -> int:
        return len(self._executables)

    def clear(self) -> None:
        self._executables.clear()


class CompileCounter:
    """Counts what XLA compiles in the thread that is inside `watch()`: the proof that traffic compiles nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT and self._thread == threading.get_ident():
            self.count += 1

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
