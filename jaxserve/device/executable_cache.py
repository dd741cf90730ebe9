"""Compiled programs on disk, so that a restart traces and compiles nothing.

A folder for each manifest (everything that decides what a program is), a file for each program. A file is loaded
only if its checksum holds, and only from a folder that belongs to this user and that nobody else may write to:
loading runs what is in it. Anything doubtful is compiled again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable

logger = logging.getLogger("jaxserve.executables")

_CHECKSUM_BYTES = 32


class ExecutableCache:
    """Programs of one manifest.

    Args:
      root: the cache's folder; made if need be, for this user alone.
      manifest: see `make_manifest`.
    """

    def __init__(self, root: Path, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, sort_keys=True, indent=1, default=str)
        self._directory = root / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._usable = self._prepare(root, text)

    def load(self, name: str, in_tree: Any, out_tree: Any) -> Any | None:
        """The program stored under `name`, ready to call; None if there is none that can be trusted.

        Args:
          in_tree: structure of ``((*args), {})``; out_tree: of the result.
        """
        if not self._usable:
            return None
        file = self._directory / f"{name}.bin"
        try:
            blob = file.read_bytes()
            checksum, payload = blob[:_CHECKSUM_BYTES], blob[_CHECKSUM_BYTES:]
            if hashlib.sha256(payload).digest() != checksum:
                raise ValueError("its checksum does not hold")
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=jax.local_devices()[:1]
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a cache file, compiling again is the cure
            logger.warning("compiling %s again: %s can't be used (%s)", name, file, error)
            return None

    def store(self, name: str, compiled: Any) -> None:
        """Keep a program. A full or read-only disk costs the next start its time, nothing else."""
        if not self._usable:
            return
        try:
            payload = serialize_executable.serialize(compiled)[0]
            self._write(f"{name}.bin", hashlib.sha256(payload).digest() + payload)
        except Exception as error:  # a platform whose programs can't be stored serves all the same
            logger.warning("compiled programs are not kept: %s", error)
            self._usable = False

    def _write(self, name: str, blob: bytes) -> None:
        """All of a file or nothing of it: readers never meet a part."""
        descriptor, partial = tempfile.mkstemp(dir=self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(blob)
            os.replace(partial, self._directory / name)
        except BaseException:
            os.unlink(partial)
            raise

    def _prepare(self, root: Path, manifest: str) -> bool:
        try:
            # `parents=True` alone would make the root as the umask says, which may let a group write.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            for folder in (root, self._directory):
                status = folder.stat()
                if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    logger.warning(
                        "%s could be written by others: compiled programs are not kept there", folder
                    )
                    return False
            (self._directory / "manifest.json").write_text(manifest)
        except OSError as error:
            logger.warning("compiled programs are not kept: %s", error)
        return self._directory.is_dir()


def make_manifest(configs: Mapping[str, Any], sources_digest: str) -> dict[str, Any]:
    """Everything that decides what the programs are.

    Args:
      configs: by name, whatever shapes the programs (model, engine, buckets, pool); compared by their text.
      sources_digest: `hash_sources` of the code that is traced, taken when it was imported.
    """
    device = jax.local_devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "machine": platform.machine(),
        "cpu_features": _cpu_features(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_config": {name: value for name, value in jax.config.values.items() if not name.endswith("_dir")},
        "sources": sources_digest,
        **{name: repr(config) for name, config in configs.items()},
    }


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), ""
    )


def hash_sources(sources: Iterable[Path]) -> str:
    """One digest of every Python and JSON file (tables that code reads) in these folders, and of these files."""
    digest = hashlib.sha256()
    for source in sources:
        found = [file for file in source.rglob("*") if file.suffix in (".py", ".json")]
        for file in sorted(found) if source.is_dir() else [source]:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(source.parent)} {content}\n".encode())
    return digest.hexdigest()
