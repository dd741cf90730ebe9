from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.compiled import BuildStoppedError, CompileCounter, ExecutableSet
from jaxserve.progress import NullProgress


def compile_something_new(salt: float) -> None:
    jax.jit(lambda x: x * salt + 1)(np.float32(2)).block_until_ready()


def test_compiles_are_counted_inside_and_nowhere_else() -> None:
    counter = CompileCounter()
    try:
        compile_something_new(1.5)
        assert counter.count == 0, "before"
        with counter:
            compile_something_new(2.5)
        assert counter.count == 1
        compile_something_new(3.5)
        with counter:
            pass
        assert counter.count == 1, "after"
        with counter, ThreadPoolExecutor(1) as pool:
            pool.submit(compile_something_new, 4.5).result()
        assert counter.count == 1, "another thread's compilations are not this one's"
        known = jax.jit(lambda x: x - 7)
        known(np.float32(1))
        with counter:
            known(np.float32(2))
        assert counter.count == 1, "a program that exists is not compiled"
        with counter:
            known(np.zeros(3, np.float32))
        assert counter.count == 2, "a new shape is"
    finally:
        counter.close()
    with counter:
        compile_something_new(5.5)
    assert counter.count == 2, "closed"


def test_an_exception_ends_the_watch() -> None:
    counter = CompileCounter()
    try:
        with pytest.raises(ZeroDivisionError), counter:
            raise ZeroDivisionError
        compile_something_new(6.5)
        assert counter.count == 0
    finally:
        counter.close()


def test_eager_operations_count_as_well() -> None:
    counter = CompileCounter()
    try:
        with counter:
            jnp.arange(1237, dtype=jnp.int16).sum()
        assert counter.count >= 1
    finally:
        counter.close()


def test_an_unknown_key_is_an_error_that_names_the_known_ones() -> None:
    programs = ExecutableSet[str](lambda key: key.upper())
    programs.build(["a", "b"], threads=2, progress=NullProgress(), what="")
    assert programs["a"] == "A"
    with pytest.raises(LookupError, match=r"no executable for c; compiled are \['a', 'b'\]"):
        programs["c"]
    programs.close()
    with pytest.raises(LookupError):
        programs["a"]


def test_only_missing_programs_are_made_and_progress_tells() -> None:
    made: list[int] = []
    lock = threading.Lock()

    def make(key: int) -> int:
        with lock:
            made.append(key)
        return key

    told: list[tuple[str, int, int]] = []
    programs = ExecutableSet[int](make)
    programs.build([1, 2, 3], threads=3, progress=lambda *state: told.append(state), what="w")
    assert sorted(made) == [1, 2, 3]
    assert told == [("w", done, 3) for done in range(4)]
    programs.build([2, 3, 4], threads=1, progress=NullProgress(), what="w")
    assert sorted(made) == [1, 2, 3, 4]
    assert len(programs) == 4


def test_a_failure_stops_the_others() -> None:
    started: list[int] = []

    def make(key: int) -> int:
        started.append(key)
        if key == 1:
            raise MemoryError("no room")
        time.sleep(0.01)  # a program takes its time
        return key

    programs = ExecutableSet[int](make)
    with pytest.raises(MemoryError, match="no room"):
        programs.build(range(1000), threads=1, progress=NullProgress(), what="")
    assert len(started) < 1000, "everything else was compiled before anyone heard of it"


def test_in_the_background_programs_come_in_order_and_are_announced_once_they_can_be_had() -> None:
    go = threading.Semaphore(0)
    announced: list[int] = []

    def make(key: int) -> int:
        assert go.acquire(timeout=10)
        return -key

    def announce(key: int) -> None:
        assert programs[key] == -key
        announced.append(key)

    programs = ExecutableSet[int](make, announce)
    go.release()
    programs.build([3], threads=1, progress=NullProgress(), what="")
    programs.build_in_background([5, 3, 4, 1])
    with pytest.raises(LookupError):
        programs[5]
    go.release()
    while announced != [3, 5]:
        time.sleep(0.001)
    go.release(2)
    programs.close()
    assert announced[:2] == [3, 5]
    assert programs.failure is None


def test_a_failure_in_the_background_is_kept_and_ends_it() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        if key == 2:
            raise MemoryError("no room")
        made.append(key)
        return key

    programs = ExecutableSet[int](make)
    programs.build_in_background([1, 2, 3])
    deadline = time.monotonic() + 10
    while programs.failure is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert isinstance(programs.failure, MemoryError)
    assert made == [1]
    programs.close()


def test_closing_waits_for_the_program_in_the_making_and_no_other() -> None:
    started, go = threading.Event(), threading.Event()
    made: list[int] = []

    def make(key: int) -> int:
        started.set()
        assert go.wait(10)
        made.append(key)
        return key

    programs = ExecutableSet[int](make)
    programs.build_in_background(range(5))
    assert started.wait(10)
    threading.Timer(0.05, go.set).start()
    programs.close()
    assert made == [0]


def test_who_is_stopped_has_not_failed() -> None:
    """Closing may also end a program that consists of several between two of these."""
    started, go = threading.Event(), threading.Event()

    def make(key: int) -> int:
        started.set()
        assert go.wait(10)
        raise BuildStoppedError

    programs = ExecutableSet[int](make)
    programs.build_in_background([1, 2])
    assert started.wait(10)
    go.set()
    programs.close()
    assert programs.failure is None
    assert len(programs) == 0
