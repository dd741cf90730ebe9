"""What a machine or a container has, read from the files that Linux shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.device.machine_memory import host_memory, machine_memory

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine of 16 GiB, 12 of them available, in no control group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {12 * 2**20} kB\n",
    )
    write(tmp_path / "proc/self/statm", "1000 250 30 4 0 5 0\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    return tmp_path / "proc"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group_v2(folder: Path, limit: int | str, usage: int, cache: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def group_v1(folder: Path, limit: int, usage: int, cache: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_a_machine_without_limits(proc: Path, tmp_path: Path) -> None:
    memory = host_memory(proc, tmp_path / "none")
    assert (memory.total, memory.available, memory.on_host) == (16 * GIB, 12 * GIB, True)
    assert memory.used == 250 * 4096


@pytest.mark.parametrize("place", ["", "system.slice/docker-1.scope", "system.slice"])
def test_version_2_limits_wherever_they_are_seen(proc: Path, tmp_path: Path, place: str) -> None:
    """The root of a container's own name space, the group itself, or a parent of it."""
    write(proc / "self/cgroup", "0::/system.slice/docker-1.scope\n")
    group_v2(tmp_path / "cgroup/system.slice/docker-1.scope", "max", GIB)
    group_v2(tmp_path / "cgroup" / place, 4 * GIB, 3 * GIB, cache=GIB)
    memory = host_memory(proc, tmp_path / "cgroup")
    assert (memory.total, memory.available) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("place", ["", "docker/abc"])
def test_version_1_limits(proc: Path, tmp_path: Path, place: str) -> None:
    write(
        proc / "self/cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/a:b\n0::/\n"
    )
    group_v1(tmp_path / "cgroup/memory/docker/abc", UNLIMITED_V1, GIB)
    group_v1(tmp_path / "cgroup/memory" / place, 8 * GIB, 5 * GIB, cache=2 * GIB)
    memory = host_memory(proc, tmp_path / "cgroup")
    assert (memory.total, memory.available) == (8 * GIB, 5 * GIB)


def test_the_tightest_of_all_limits_counts(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/a/b\n")
    group_v2(tmp_path / "cgroup/a", 2 * GIB, GIB)
    group_v2(tmp_path / "cgroup/a/b", 6 * GIB, 6 * GIB)
    memory = host_memory(proc, tmp_path / "cgroup")
    assert (memory.total, memory.available) == (2 * GIB, 0)


def test_a_limit_above_the_machine_changes_nothing(proc: Path, tmp_path: Path) -> None:
    group_v2(tmp_path / "cgroup", 64 * GIB, 0)
    memory = host_memory(proc, tmp_path / "cgroup")
    assert (memory.total, memory.available) == (16 * GIB, 12 * GIB)


def test_files_that_are_not_there_or_not_numbers(tmp_path: Path) -> None:
    """macOS, or a kernel of another kind."""
    memory = host_memory(tmp_path / "none", tmp_path / "none")
    assert memory.total == memory.available > 0
    assert memory.used == 0


def test_this_machine() -> None:
    memory = machine_memory()
    assert 0 < memory.used < memory.total
    assert 0 <= memory.available <= memory.total
