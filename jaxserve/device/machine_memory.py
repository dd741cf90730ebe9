"""How much memory there is: on an accelerator the device's, on a CPU what this process may have of the machine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes.

    Attributes:
      total: of the device; on a CPU, of the machine, or what a control group allows if that is less.
      available: what can be had of it now; `used`: what this process has of it now.
      on_host: the process and the arrays share it.
    """

    total: int
    available: int
    used: int
    on_host: bool


def machine_memory() -> MachineMemory:
    """Of the first device, as it is now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        total, used = int(stats["bytes_limit"]), int(stats["bytes_in_use"])
        return MachineMemory(total, total - used, used, on_host=False)
    return host_memory()


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MachineMemory:
    """Of this process's machine, or container.

    Args:
      proc, cgroup: where these file systems are mounted.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = _keyed_numbers(proc / "meminfo")
    total = info.get("MemTotal:", physical // 1024) * 1024
    available = info.get("MemAvailable:", total // 1024) * 1024
    for limit, free in _cgroup_limits(proc, cgroup):
        total, available = min(total, limit), min(available, free)
    return MachineMemory(total, max(available, 0), resident_bytes(proc), on_host=True)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Physical memory of this process; 0 where nobody says."""
    text = _read(proc / "self/statm").split()
    return int(text[1]) * os.sysconf("SC_PAGE_SIZE") if len(text) > 1 else 0


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of every control group, of either version, that this process is in and that has a limit.

    A group can be seen under its full path, or (in a container) be the root itself; a limit of any parent counts.
    What the kernel would drop of the page cache when it is asked for memory is free.
    """
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, cache = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = (
                cgroup / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cache = "total_inactive_file"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            group = root.joinpath(*parts[:depth])
            limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
            if limit.isdigit() and usage.isdigit():
                dropped = _keyed_numbers(group / "memory.stat").get(cache, 0)
                yield int(limit), int(limit) - int(usage) + dropped


def _keyed_numbers(file: Path) -> dict[str, int]:
    """Lines of ``key number ...``."""
    fields = (line.split() for line in _read(file).splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
