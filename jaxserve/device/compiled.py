"""The executable set: one compiled program for each known signature, and a refusal for any other."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import jax

from jaxserve.device.compile_threads import in_threads
from jaxserve.device.host_allocator import release_free_memory
from jaxserve.progress import Progress

logger = logging.getLogger("jaxserve.programs")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class BuildStoppedError(Exception):
    """Programs are wanted no more; what has been made is kept."""


class ExecutableSet[Key: Hashable]:
    """Programs by key. After `build` nothing is ever traced or compiled again.

    Args:
      make_one: loads the program of a key, or else traces, lowers and compiles it. In the background it may raise
        BuildStoppedError.
      on_ready: told each key as soon as its program can be had, in the thread that builds.

    Attributes:
      failure: what ended `build_in_background` before it was through.
    """

    def __init__(self, make_one: Callable[[Key], Any], on_ready: Callable[[Key], None] | None = None) -> None:
        self._make_one = make_one
        self._on_ready = on_ready or (lambda key: None)
        self._executables: dict[Key, Any] = {}
        self._background: threading.Thread | None = None
        self._restore_priority: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self.failure: BaseException | None = None

    def build(self, keys: Iterable[Key], *, threads: int, progress: Progress, what: str) -> None:
        """Make every program that is missing, `threads` at a time."""
        missing = [key for key in keys if key not in self._executables]
        for key, program in in_threads(
            self._make_one, missing, threads=threads, progress=progress, what=what
        ):
            self._add(key, program)

    def build_in_background(self, keys: Iterable[Key]) -> None:
        """Make every program that is missing, in order, one after the other, in a thread that yields to all others.

        Whoever needs the programs looks at `failure`; nobody waits for them.
        """
        missing = [key for key in keys if key not in self._executables]
        self._background = threading.Thread(
            target=self._build_quietly, args=(missing,), name="compile", daemon=True
        )
        self._background.start()

    def _build_quietly(self, keys: list[Key]) -> None:
        started = time.monotonic()
        try:
            self._restore_priority = _lower_priority()
            for key in keys:
                if self._closing.is_set():
                    return
                self._add(key, self._make_one(key))
                release_free_memory()  # which serving has not been accounted for
        except BuildStoppedError:
            return
        except BaseException as error:  # kept for the engine, which ends by it
            logger.critical("a program could not be made", exc_info=error)
            self.failure = error
        else:
            logger.info(
                "all %d programs are ready, %.1f s after serving began",
                len(self),
                time.monotonic() - started,
            )

    def _add(self, key: Key, program: Any) -> None:
        self._executables[key] = program
        self._on_ready(key)

    def __getitem__(self, key: Key) -> Any:
        """The program of `key`.

        Raises:
          LookupError: it was not built. In traffic a compile is an error, never something to wait for.
        """
        if key not in self._executables:
            raise LookupError(f"no executable for {key}; compiled are {sorted(map(str, self._executables))}")
        return self._executables[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._executables

    def __len__(self) -> int:
        return len(self._executables)

    def close(self) -> None:
        """Drop all programs, once the one that is being made in the background is done."""
        self._closing.set()
        if self._background is not None:
            self._restore_priority()  # now somebody waits for it, maybe on a busy machine
            self._background.join()
        self._executables.clear()


def _lower_priority() -> Callable[[], None]:
    """Of this thread alone, where the system can do that (Linux counts threads like processes).

    Returns:
      What takes it back, as far as the system permits that.
    """
    if sys.platform != "linux":
        return lambda: None
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, before + 10)

    def restore() -> None:
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, before)

    return restore


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
