from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import executable_cache
from jaxserve.device.executable_cache import ExecutableCache
from tests.conftest import REPOSITORY
from tests.ordinary_user import ordinary_user

MANIFEST = {"what": "test"}
ABSTRACT = (jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32))
IN_TREE = jax.tree.structure((ABSTRACT, {}))
OUT_TREE = jax.tree.structure((0, 0))


def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state + x, (state * x).sum()


@pytest.fixture(scope="module")
def program() -> Any:
    """Donates its first argument."""
    return jax.jit(step, donate_argnums=0).lower(*ABSTRACT).compile()


def check_program(program: Any) -> None:
    state = jnp.arange(8.0)
    new, total = program(state, np.full(8, 2.0, np.float32))
    assert np.array_equal(new, np.arange(8) + 2.0)
    assert float(total) == 56.0
    assert state.is_deleted(), "donation was lost"


def load(cache: ExecutableCache, name: str = "p") -> Any:
    return cache.load(name, IN_TREE, OUT_TREE)


def folder_of(root: Path) -> Path:
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return folder


def test_a_stored_program_does_the_same_in_the_next_run(tmp_path: Path, program: Any) -> None:
    root = tmp_path / "a" / "cache"
    cache = ExecutableCache(root, MANIFEST)
    assert load(cache) is None
    cache.store("p", program)
    check_program(load(cache))
    check_program(load(ExecutableCache(root, MANIFEST)))
    assert load(cache, "q") is None
    names = sorted(file.name for file in folder_of(root).iterdir())
    assert names == ["manifest.json", "p.bin"], "no leftovers"


def test_a_program_from_another_process_is_as_good(tmp_path: Path) -> None:
    """Stored there, loaded here; nothing is traced again."""
    writer = start_writer(tmp_path / "cache", "once")
    assert writer.wait(120) == 0
    check_program(load(ExecutableCache(tmp_path / "cache", MANIFEST)))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda blob: b"",
    "only a checksum": lambda blob: blob[:32],
    "half a checksum": lambda blob: blob[:16],
    "cut in half": lambda blob: blob[: len(blob) // 2],
    "last byte gone": lambda blob: blob[:-1],
    "one byte more": lambda blob: blob + b"x",
    "a bit in the checksum": lambda blob: bytes([blob[0] ^ 1]) + blob[1:],
    "a bit in the middle": lambda blob: blob[:999] + bytes([blob[999] ^ 8]) + blob[1000:],
    "a bit at the end": lambda blob: blob[:-1] + bytes([blob[-1] ^ 128]),
    "zeros": lambda blob: bytes(len(blob)),
    "sound checksum of nonsense": lambda blob: (
        executable_cache.hashlib.sha256(b"nonsense").digest() + b"nonsense"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_never_run_and_can_be_replaced(
    tmp_path: Path, program: Any, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cache = ExecutableCache(tmp_path / "cache", MANIFEST)
    cache.store("p", program)
    file = folder_of(tmp_path / "cache") / "p.bin"
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert load(cache) is None
    assert str(file) in caplog.text
    cache.store("p", program)
    check_program(load(cache))


def test_a_folder_in_place_of_a_file_is_not_fatal(tmp_path: Path, program: Any) -> None:
    cache = ExecutableCache(tmp_path / "cache", MANIFEST)
    (folder_of(tmp_path / "cache") / "p.bin").mkdir()
    assert load(cache) is None
    cache.store("p", program)
    assert load(cache) is None
    cache.store("q", program)  # B232: one file that is in the way stops no other from being kept
    check_program(load(cache, "q"))


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077, 0o000])
def test_the_folders_are_for_this_user_alone_whatever_the_umask(
    tmp_path: Path, program: Any, mask: int
) -> None:
    """Where the umask lets a group write (as many distributions do), the cache must work all the same."""
    before = os.umask(mask)
    try:
        cache = ExecutableCache(tmp_path / "parent" / "cache", MANIFEST)
        cache.store("p", program)
    finally:
        os.umask(before)
    check_program(load(cache))
    folder = folder_of(tmp_path / "parent" / "cache")
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / "p.bin").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
@pytest.mark.parametrize("which", ["root", "folder"])
def test_a_folder_that_others_may_write_to_is_not_trusted(
    tmp_path: Path, program: Any, mode: int, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading runs what is in a file: whoever can put one there would run code as this user."""
    root = tmp_path / "cache"
    ExecutableCache(root, MANIFEST).store("p", program)
    folder = folder_of(root)
    (root if which == "root" else folder).chmod(mode)
    with caplog.at_level(logging.WARNING):
        cache = ExecutableCache(root, MANIFEST)
    assert "could be written by others" in caplog.text
    assert load(cache) is None
    before = (folder / "p.bin").read_bytes()
    cache.store("p", program)
    cache.store("q", program)
    assert (folder / "p.bin").read_bytes() == before
    assert not (folder / "q.bin").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to another user")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, program: Any) -> None:
    root = tmp_path / "cache"
    ExecutableCache(root, MANIFEST).store("p", program)
    os.chown(root, 12345, -1)
    assert load(ExecutableCache(root, MANIFEST)) is None


def test_a_read_only_cache_is_read(program: Any, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "cache"
        ExecutableCache(root, MANIFEST).store("p", program)
        folder = folder_of(root)
        for path in (Path(name), root, folder):
            path.chmod(0o555)
        for path in folder.iterdir():
            path.chmod(0o444)
        try:
            with ordinary_user(), caplog.at_level(logging.WARNING):
                cache = ExecutableCache(root, MANIFEST)
                check_program(load(cache))
                cache.store("q", program)
                check_program(load(cache))  # also behind one that was missing and could not be kept
        finally:
            for path in (Path(name), root, folder):
                path.chmod(0o700)
        assert not (folder / "q.bin").exists()
        assert "not kept" in caplog.text


def test_a_root_that_cannot_be_made_costs_a_warning_only(
    tmp_path: Path, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        caches = [
            ExecutableCache(tmp_path / "file", MANIFEST),
            ExecutableCache(tmp_path / "file" / "x", MANIFEST),
        ]
        with ordinary_user() as home:
            caches.append(ExecutableCache(home / "cache", MANIFEST))
    assert caplog.text.count("not kept") == 3
    for cache in caches:
        assert load(cache) is None
        cache.store("p", program)
        assert load(cache) is None


def test_a_disk_that_fills_up_leaves_no_partial_file(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ExecutableCache(tmp_path / "cache", MANIFEST)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(executable_cache.os, "replace", full)
        cache.store("p", program)
        cache.store("q", program)
    assert caplog.text.count("No space left") == 1, "once is enough"
    assert [file.name for file in folder_of(tmp_path / "cache").iterdir()] == ["manifest.json"]
    cache.store("p", program)
    check_program(load(cache))  # there is room again


def test_a_program_that_cannot_be_serialised_is_no_reason_to_stop(
    tmp_path: Path, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Platforms differ in what they can store; a program with a callback into Python never can be. Others are kept."""

    def talk(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x)

    compiled = jax.jit(talk).lower(jnp.float32(1)).compile()
    with caplog.at_level(logging.WARNING):
        cache = ExecutableCache(tmp_path / "cache", MANIFEST)
        cache.store("p", compiled)
    assert "not kept" in caplog.text
    cache.store("q", program)
    check_program(load(cache, "q"))


WRITER = """
import sys
from pathlib import Path
import jax
from jaxserve.device.executable_cache import ExecutableCache
from tests.device.test_executable_cache import ABSTRACT, MANIFEST, step
program = jax.jit(step, donate_argnums=0).lower(*ABSTRACT).compile()
cache = ExecutableCache(Path(sys.argv[1]), MANIFEST)
print("ready", flush=True)
while True:
    cache.store("p", program)
    if sys.argv[2] == "once":
        break
"""


def start_writer(root: Path, mode: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), mode],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    )


def test_writers_at_once_and_writers_killed_leave_only_whole_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    writers = [start_writer(root, "forever") for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        cache = ExecutableCache(root, MANIFEST)
        with caplog.at_level(logging.WARNING):
            for _ in range(30):
                found = load(cache)
                assert found is not None
                check_program(found)
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait(60)
                time.sleep(0.01)
            check_program(load(ExecutableCache(root, MANIFEST)))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(60)
    assert not caplog.records, "a reader met half a file"


def test_what_a_killed_writer_leaves_is_not_trusted(tmp_path: Path, program: Any) -> None:
    """A temporary file that never got its name is no program, whatever it holds."""
    cache = ExecutableCache(tmp_path / "cache", MANIFEST)
    cache.store("q", program)
    folder = folder_of(tmp_path / "cache")
    whole = (folder / "q.bin").read_bytes()
    (folder / "tmpabcdefg").write_bytes(whole[:1000])
    (folder / "p.bin.tmp").write_bytes(whole)
    fresh = ExecutableCache(tmp_path / "cache", MANIFEST)
    assert load(fresh) is None
    check_program(load(fresh, "q"))
    fresh.store("p", program)
    check_program(load(fresh))


def test_what_killed_writers_leave_is_removed_once_nobody_can_be_writing_it(
    tmp_path: Path, program: Any
) -> None:
    """B232: or a process that is killed at every start would fill the disk."""
    cache = ExecutableCache(tmp_path / "cache", MANIFEST)
    cache.store("q", program)
    partial = folder_of(tmp_path / "cache") / f"{executable_cache.PARTIAL}abcdefgh"
    partial.write_bytes(bytes(1000))
    ExecutableCache(tmp_path / "cache", MANIFEST).close()
    assert partial.exists(), "the first one is still there, and may be at it"
    cache.close()
    again = ExecutableCache(tmp_path / "cache", MANIFEST)
    assert sorted(file.name for file in partial.parent.iterdir()) == ["manifest.json", "q.bin"]
    check_program(load(again, "q"))


BASE = {"jaxlib": "1", "sources": {"step.py": "a"}, "model": {"layers": 2, "width": 8}, "seqs": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "version": {"jaxlib": "2"},
    "source": {"sources": {"step.py": "b"}},
    "another source": {"sources": {"step.py": "a", "more.py": "a"}},
    "model": {"model": {"layers": 2, "width": 9}},
    "number instead of text": {"seqs": "64"},
    "a further field": {"kind": None},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_any_difference_means_another_folder(tmp_path: Path, program: Any, change: dict[str, Any]) -> None:
    ExecutableCache(tmp_path, BASE).store("p", program)
    assert load(ExecutableCache(tmp_path, dict(reversed(BASE.items())))) is not None, "the same again"
    assert load(ExecutableCache(tmp_path, BASE | change)) is None


def said_at_start(root: Path, manifest: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        ExecutableCache(root, manifest)
    return caplog.messages


def test_what_differs_from_the_nearest_of_those_kept_is_said_once(
    tmp_path: Path, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert said_at_start(tmp_path, BASE, caplog) == [], "a first start has nothing to compare with"
    changed = BASE | {"jaxlib": "2", "sources": {"step.py": "b"}}
    assert said_at_start(tmp_path, changed, caplog) == [], "nor has one beside a folder without programs"
    ExecutableCache(tmp_path, BASE).store("p", program)
    ExecutableCache(tmp_path, {"jaxlib": "0"}).store("p", program)
    said = "compiling again: jaxlib 1 -> 2, source of the step changed (step.py)"
    assert said_at_start(tmp_path, changed, caplog) == [said]
    assert said_at_start(tmp_path, BASE, caplog) == [], "its programs are there"
    ExecutableCache(tmp_path, changed).store("p", program)
    assert said_at_start(tmp_path, changed, caplog) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_damaged_manifest_explains_nothing_and_is_written_again(
    tmp_path: Path, program: Any, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ExecutableCache(tmp_path, BASE).store("p", program)
    file = folder_of(tmp_path) / "manifest.json"
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert said_at_start(tmp_path, BASE | {"seqs": 1}, caplog) == []
    check_program(load(ExecutableCache(tmp_path, BASE)))
    assert file.read_bytes() == whole
    assert json.loads(whole) == BASE


def test_strangers_in_the_folder_are_left_alone(
    tmp_path: Path, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "p.bin").write_text("no program")
    assert said_at_start(tmp_path, BASE, caplog) == []
    cache = ExecutableCache(tmp_path, BASE)
    cache.store("p", program)
    check_program(load(cache))
    assert (tmp_path / "photos" / "p.bin").exists()
