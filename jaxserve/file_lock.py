"""Advisory locks between processes. They end with the process that holds them, so a kill leaves nothing to clean."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path` (made if missing) alone; `on_wait` is called once if somebody else has it."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def shared(directory: Path) -> Iterator[None]:
    """Mark a directory as in use. Needs no write permission; where the file system has no locks, does nothing."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here (some network mounts): reading works all the same
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def in_use(directory: Path) -> bool:
    """Whether some process has the directory marked with `shared`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
