"""Compiled programs on disk, so that a restart traces and compiles nothing.

A folder for each manifest (everything that decides what a program is) with the manifest in it, a file for each program.
A file is loaded only if its checksum holds, and only from a folder that belongs to this user and that nobody else may
write to: loading runs what is in it. Anything doubtful is compiled again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve import file_lock
from jaxserve.device.program_eviction import MANIFEST, changing
from jaxserve.device.program_manifest import describe_differences, shorten

logger = logging.getLogger("jaxserve.executables")

_CHECKSUM_BYTES = 32
PARTIAL = "partial-"  # begins the names of files that are being written


class ExecutableCache:
    """Programs of one manifest. Until `close`, nobody removes them.

    Args:
      root: the cache's folder; made if need be, for this user alone.
      manifest: see `make_manifest`.

    Attributes:
      directory: where these programs lie.
    """

    def __init__(self, root: Path, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, sort_keys=True, indent=1)
        self._in_use = ExitStack()
        self.directory = root / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._trusted = self._prepare(root, text)
        self._told: set[tuple[type[Exception], int | None]] = set()  # why something was not kept
        if self._trusted and not _has_programs(self.directory):
            _tell_why(root, manifest)

    def load(self, name: str, in_tree: Any, out_tree: Any) -> Any | None:
        """The program stored under `name`, ready to call; None if there is none that can be trusted.

        Args:
          in_tree: structure of ``((*args), {})``; out_tree: of the result.
        """
        payload = self._read(name)
        if payload is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=jax.local_devices()[:1]
            )
        except Exception as error:  # whatever is wrong with a cache file, compiling again is the cure
            self._warn(name, error)
            return None

    def has(self, name: str) -> bool:
        """Whether a program is stored under `name` and is what was stored; whether it loads can be tried only where
        its device is."""
        return self._read(name) is not None

    def _read(self, name: str) -> bytes | None:
        if not self._trusted:
            return None
        try:
            blob = (self.directory / f"{name}.bin").read_bytes()
            checksum, payload = blob[:_CHECKSUM_BYTES], blob[_CHECKSUM_BYTES:]
            if hashlib.sha256(payload).digest() != checksum:
                raise ValueError("its checksum does not hold")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(name, error)
            return None
        return payload

    def _warn(self, name: str, error: Exception) -> None:
        logger.warning(
            "compiling %s again: %s can't be used (%s)", name, self.directory / f"{name}.bin", error
        )

    def store(self, name: str, compiled: Any) -> None:
        """Keep a program. One that can't be kept costs the next start its time, nothing else: others are loaded and
        kept as before, and the same reason is told once."""
        if not self._trusted:
            return
        try:
            payload = serialize_executable.serialize(compiled)[0]
            self._write(f"{name}.bin", hashlib.sha256(payload).digest() + payload)
        except Exception as error:  # a platform whose programs can't be stored serves all the same
            reason = type(error), getattr(error, "errno", None)
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("compiled programs are not kept: %s", error)

    def _write(self, name: str, blob: bytes) -> None:
        """All of a file or nothing of it: readers never meet a part."""
        descriptor, partial = tempfile.mkstemp(dir=self.directory, prefix=PARTIAL)
        try:
            with open(descriptor, "wb") as file:
                file.write(blob)
            os.replace(partial, self.directory / name)
        except BaseException:
            os.unlink(partial)
            raise

    def _prepare(self, root: Path, manifest: str) -> bool:
        """Whether programs there can be trusted; the rest is done as far as it can be."""
        trusted = False
        try:
            # `parents=True` alone would make the root as the umask says, which may let a group write.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours_alone(root):
                return False
            with changing(root):
                self.directory.mkdir(mode=0o700, exist_ok=True)
                trusted = _is_ours_alone(self.directory)
                if trusted and not file_lock.in_use(self.directory):
                    _remove_partial(self.directory)
                self._in_use.enter_context(file_lock.shared(self.directory))
            if trusted and _read_bytes(self.directory / MANIFEST) != manifest.encode():
                self._write(MANIFEST, manifest.encode())
            with suppress(OSError):  # read-only
                os.utime(self.directory / MANIFEST)
        except OSError as error:
            logger.warning("compiled programs are not kept: %s", error)
        return trusted

    def close(self) -> None:
        """From now on others may remove the programs. What is loaded stays."""
        self._in_use.close()


def _is_ours_alone(folder: Path) -> bool:
    status = folder.stat()
    if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    logger.warning("%s could be written by others: compiled programs are not kept there", folder)
    return False


def _remove_partial(directory: Path) -> None:
    """Files whose writers were killed: nobody else is there."""
    for file in directory.glob(f"{PARTIAL}*"):
        with suppress(OSError):  # read-only
            file.unlink()


def _has_programs(directory: Path) -> bool:
    return any(directory.glob("*.bin"))


def _tell_why(root: Path, manifest: Mapping[str, Any]) -> None:
    """Log how this manifest differs from the most similar one that has programs."""
    others = [folder for folder in root.iterdir() if _has_programs(folder)]
    known = [describe_differences(old, manifest) for folder in others if (old := _read_manifest(folder))]
    if known:
        logger.info("compiling again: %s", shorten(min(known, key=len)))


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """None if there is none that can be read: it only serves to explain, so that is no harm."""
    try:
        manifest = json.loads(_read_bytes(directory / MANIFEST))
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) else None


def _read_bytes(file: Path) -> bytes:
    """Empty if it can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
