"""Removing compiled programs that nobody has used for long, once their folder has grown past a bound."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxserve import file_lock

MANIFEST = (
    "manifest.json"  # its time of modification is that of the last start that used the programs beside it
)
LOCK = "lock"
_FOLDER = re.compile(r"[0-9a-f]{32}")

logger = logging.getLogger("jaxserve.executables")


@dataclass(frozen=True)
class KeptPrograms:
    """The programs of one manifest on disk. `last_used` is in seconds since the epoch."""

    folder: Path
    num_bytes: int
    last_used: float


def kept_programs(root: Path) -> list[KeptPrograms]:
    """All in a cache folder, the least recently used first. What else lies there is no business of ours."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(FileNotFoundError):  # somebody removed it meanwhile
                manifest = folder / MANIFEST
                last_used = (manifest if manifest.exists() else folder).stat().st_mtime
                found.append(KeptPrograms(folder, _bytes_in(folder), last_used))
    return sorted(found, key=lambda kept: (kept.last_used, kept.folder.name))


def evict_programs(root: Path, max_bytes: int) -> None:
    """Remove whole manifests' programs, the least recently used first, until the rest takes `max_bytes` at most.

    Those that some process has open stay, whatever they take. A folder that can't be changed is left as it is.
    """
    try:
        with changing(root):
            kept = kept_programs(root)
            excess = sum(each.num_bytes for each in kept) - max_bytes
            for each in kept:
                if excess > 0 and not file_lock.in_use(each.folder):
                    shutil.rmtree(each.folder)
                    excess -= each.num_bytes
                    logger.info("removed %s of old programs: %s", mebibytes(each.num_bytes), each.folder)
    except OSError as error:
        logger.warning("old programs are not removed: %s", error)


@contextmanager
def changing(root: Path) -> Iterator[None]:
    """Alone among those who make or remove folders in `root`. Where nothing can be written there is no such need."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(file_lock.exclusive(root / LOCK))
        yield


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a file that was being written got its name
            total += file.stat().st_size if file.is_file() else 0
    return total


def mebibytes(num_bytes: int) -> str:
    """ "12.3 MiB"."""
    return f"{num_bytes / 2**20:.1f} MiB"
