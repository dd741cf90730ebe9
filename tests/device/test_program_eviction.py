from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.device.executable_cache import ExecutableCache
from jaxserve.device.program_eviction import evict_programs, kept_programs
from tests.conftest import REPOSITORY
from tests.device.test_executable_cache import ABSTRACT, check_program, load, step


def put(root: Path, number: int, size: int, used: float) -> Path:
    """Programs of `size` bytes (manifest included), last used at `used`."""
    folder = root / f"{number:032x}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "p.bin").write_bytes(bytes(size - 2))
    os.utime(folder / "manifest.json", (used, used))
    return folder


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(0, 3)), max_size=6), st.integers(0, 40))
def test_the_latest_that_fit_stay_and_no_more_goes_than_must(
    sizes_and_times: list[tuple[int, int]], bound: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number, (size, used) in enumerate(sizes_and_times):
            put(root, number, size, 1000 + used)
        before = kept_programs(root)
        evict_programs(root, bound)
        after = kept_programs(root)
        assert after == before[len(before) - len(after) :], "the least recently used go first"
        assert [kept.last_used for kept in before] == sorted(kept.last_used for kept in before)
        assert sum(kept.num_bytes for kept in after) <= bound
        if len(after) < len(before):
            last_to_go = before[len(before) - len(after) - 1]
            assert sum(kept.num_bytes for kept in (last_to_go, *after)) > bound, "it could have stayed"


def test_what_is_in_use_stays_and_counts(tmp_path: Path) -> None:
    old = [put(tmp_path, number, 100, used=number) for number in range(3)]
    cache = ExecutableCache(tmp_path, {"ours": 1})
    cache.store("p", jax.jit(step, donate_argnums=0).lower(*ABSTRACT).compile())
    own = cache.directory
    os.utime(own / "manifest.json", (0, 0))  # the oldest by far
    own_bytes = sum(file.stat().st_size for file in own.iterdir())
    evict_programs(tmp_path, own_bytes + 250)
    assert [folder.exists() for folder in old] == [False, True, True]
    evict_programs(tmp_path, 0)
    assert names(tmp_path) == {own.name, "lock"}
    check_program(load(cache))
    cache.close()
    evict_programs(tmp_path, 0)
    assert names(tmp_path) == {"lock"}


def test_to_open_is_to_use(tmp_path: Path) -> None:
    """Loading everything and storing nothing keeps programs as well."""
    for manifest in ({"a": 1}, {"b": 1}):
        cache = ExecutableCache(tmp_path, manifest)
        (cache.directory / "p.bin").write_bytes(bytes(1000))
        os.utime(cache.directory / "manifest.json", (1000, 1000))
        cache.close()
    again = ExecutableCache(tmp_path, {"a": 1})
    again.close()
    evict_programs(tmp_path, 1500)
    assert names(tmp_path) == {again.directory.name, "lock"}


def test_nothing_else_is_ever_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    precious = put(elsewhere, 7, 1000, 0)
    root = tmp_path / "root"
    put(root, 1, 1000, 0)
    (root / ("ab" * 16)).symlink_to(precious)
    (root / ("cd" * 16)).write_text("a file")
    (root / ("ef" * 15)).mkdir()
    (root / "photos").mkdir()
    (root / "photos" / "p.bin").write_bytes(bytes(1000))
    expected = names(root) - {f"{1:032x}"} | {"lock"}
    evict_programs(root, 0)
    assert names(root) == expected
    assert (precious / "p.bin").stat().st_size == 998
    assert (root / "photos" / "p.bin").exists()


def test_programs_without_a_manifest_go_by_their_folder(tmp_path: Path) -> None:
    """As a killed start, or a killed removal, leaves them."""
    folder = put(tmp_path, 1, 10, 0)
    (folder / "manifest.json").unlink()
    (folder / "tmpabc").write_bytes(bytes(10))
    evict_programs(tmp_path, 17)
    assert names(tmp_path) == {"lock"}


def test_a_folder_that_is_not_there_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evict_programs(tmp_path / "missing", 0)
    assert not caplog.records


def test_a_folder_that_cannot_be_removed_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, 1, 10, 0)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING):
        evict_programs(tmp_path, 0)
    assert "not removed" in caplog.text
    assert folder.exists()


USER = """
import logging, sys
from pathlib import Path
import jax
from jaxserve.device.executable_cache import ExecutableCache
from tests.device.test_executable_cache import ABSTRACT, check_program, load, step
program = jax.jit(step, donate_argnums=0).lower(*ABSTRACT).compile()
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    cache = ExecutableCache(Path(sys.argv[1]), {"same": number % 2})
    cache.store("p", program)
    check_program(load(cache))
    cache.close()
cache = ExecutableCache(Path(sys.argv[1]), {"held": sys.argv[3]})
cache.store("p", program)
Path(sys.argv[1] + ".held" + sys.argv[3]).touch()
sys.stdin.readline()
check_program(load(cache))
print("whole", flush=True)
"""


def test_processes_that_remove_and_processes_that_use_do_not_meet(tmp_path: Path) -> None:
    """Two open, store, load and close without end, while this one removes all it can; then they hold on to theirs."""
    root = tmp_path / "cache"
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(root), "60", str(number)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for user in users:
            assert user.stdout is not None
            assert user.stdout.readline() == "ready\n", user.communicate()[1]
        for user in users:
            assert user.stdin is not None
            user.stdin.write("\n")
            user.stdin.flush()
        removed = 0
        while len(list(tmp_path.glob("cache.held*"))) < len(users):
            assert all(user.poll() is None for user in users)
            before = kept_programs(root)
            evict_programs(root, 0)
            removed += len({kept.folder for kept in before} - {kept.folder for kept in kept_programs(root)})
        assert removed, "nothing was ever removed: the test shows nothing"
        evict_programs(root, 0)
        for user in users:
            out, err = user.communicate("\n", timeout=60)
            assert out.endswith("whole\n"), err
            assert "again" not in err, err
            assert "not kept" not in err, err
        evict_programs(root, 0)
        assert not kept_programs(root), "their locks ended with them"
    finally:
        for user in users:
            user.kill()
            user.wait(60)
