"""Freed memory is kept: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxserve.device.host_allocator import keep_freed_memory

FAULTS_OF_THE_LAST_ROUND = """
import resource, sys
import numpy as np
from jaxserve.device.host_allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.full(12 << 18, value, np.float32) for value in range(4)]
    del arrays
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def faults(mode: str) -> int:
    # Huge pages would hide it: one fault for 512 small ones.
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    command = [sys.executable, "-c", FAULTS_OF_THE_LAST_ROUND, mode]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_what_was_freed_is_taken_again() -> None:
    pages = 4 * (12 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("as it comes") > pages / 2
    assert faults("keep") < pages / 20


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")]
)
def test_the_environment_has_the_say(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
