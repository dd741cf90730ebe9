"""What a result depends on besides the code; kept beside it, so that nobody compares numbers of two machines."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def describe_environment() -> dict[str, object]:
    """That of `describe_host`, and the device of this process."""
    import jax

    device = jax.local_devices()[0]
    return {**describe_host(), "device": f"{device.platform}: {device.device_kind}"}


def describe_host() -> dict[str, object]:
    """Date (UTC), commit, versions and machine; everything JSON can hold. Starts no device."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        },
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _commit() -> str | None:
    """Of the checkout that this package runs from, with "-dirty" where files were changed; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
