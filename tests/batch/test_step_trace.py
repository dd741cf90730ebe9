"""Recording steps must cost the engine nothing, whatever the disk does; reading them must trust nothing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.batch.step_sizes import StepLimits
from jaxserve.batch.step_trace import StepRecorder, read_trace
from jaxserve.errors import ConfigError

LIMITS = StepLimits(max_tokens=50, max_seqs=8)
HEADER = b'{"jaxserve_steps": 1, "max_num_batched_tokens": 50, "max_num_seqs": 8}\n'


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@given(st.lists(st.integers(1, 8).flatmap(lambda s: st.tuples(st.integers(s, 50), st.just(s))), min_size=1))
def test_what_was_recorded_is_read(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    recorder = StepRecorder(path, LIMITS)
    for step in steps:
        recorder.add(*step)
    recorder.close()
    recorder.close()
    trace = read_trace(path)
    assert trace.limits == LIMITS
    assert trace.sizes.weights == Counter(steps)
    assert trace.num_steps == len(steps)


def test_steps_reach_the_disk_while_the_engine_runs(tmp_path: Path) -> None:
    """So an engine that is killed has lost a second, not all."""
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, LIMITS)
    recorder.add(3, 1)
    until(lambda: path.read_text().count("\n") == 2)
    recorder.add(4, 2)
    until(lambda: path.read_text().count("\n") == 3)
    assert read_trace(path).sizes.weights == {(3, 1): 1, (4, 2): 1}
    recorder.close()


def test_a_recording_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, LIMITS, max_steps=100)
    for _ in range(150):
        recorder.add(5, 5)
    until(lambda: "no more steps" in caplog.text)
    recorder.add(5, 5)
    recorder.close()
    assert read_trace(path).num_steps == 100
    assert len(caplog.records) == 1


def test_an_older_recording_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for steps in (3, 1):
        recorder = StepRecorder(path, LIMITS)
        for _ in range(steps):
            recorder.add(2, 2)
        recorder.close()
        assert read_trace(path).num_steps == steps
    precious = tmp_path / "answers.jsonl"
    precious.write_text('{"custom_id": "a"}\n')
    with pytest.raises(ConfigError, match="not a recording"):
        StepRecorder(precious, LIMITS)
    assert precious.read_text() == '{"custom_id": "a"}\n'


@pytest.mark.parametrize("place", ["missing/steps.jsonl", "."])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StepRecorder(tmp_path / place, LIMITS)
    assert str(tmp_path) in str(caught.value)


def test_a_disk_that_hangs_holds_up_no_step(tmp_path: Path) -> None:
    """A pipe that nobody reads blocks whoever opens it."""
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, LIMITS)
    path.unlink()
    os.mkfifo(path)
    recorder.add(1, 1)
    time.sleep(1.5)  # the writer is stuck by now
    for _ in range(100_000):
        recorder.add(7, 7)
    received: list[bytes] = []

    def drain() -> None:
        pipe = os.open(path, os.O_RDWR)  # lets it go on, and is no end of file between two of its writes
        while sum(chunk.count(b"\n") for chunk in received) < 100_001:
            received.append(os.read(pipe, 1 << 20))
        os.close(pipe)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    recorder.close()
    reader.join(60)
    assert not reader.is_alive(), "what was recorded meanwhile is lost"


def test_a_disk_that_fails_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    recorder = StepRecorder(path, LIMITS)
    path.unlink()
    path.mkdir()
    recorder.add(1, 1)
    with caplog.at_level(logging.WARNING):
        until(lambda: "no longer recorded" in caplog.text)
    for _ in range(10):
        recorder.add(1, 1)
    recorder.close()
    assert len(caplog.records) == 1


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(HEADER + b'{"tokens": 3, "seqs": 1}\n{"tokens": 3, "se')
    assert read_trace(path).sizes.weights == {(3, 1): 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no recorded step"),
        (HEADER, "no recorded step"),
        (HEADER[:-1], "no recorded step"),
        (b'{"tokens": 3, "seqs": 1}\n', "is not a recording"),
        (b"\x89PNG\r\n\x1a\n\x00\n", "is not a recording"),
        (b"[1]\n", "is not a recording"),
        (HEADER.replace(b"1,", b"2,", 1) + b'{"tokens": 3, "seqs": 1}\n', "line 1"),
        (HEADER.replace(b"50", b"0") + b'{"tokens": 3, "seqs": 1}\n', "line 1"),
        (HEADER.replace(b"50", b'"50"') + b'{"tokens": 3, "seqs": 1}\n', "line 1"),
        (HEADER + b'{"tokens": 3, "seqs": 1}\n\n', "line 3"),
        (HEADER + b'{"tokens": 3, "seqs": 1}\n{"tok\n', "line 3"),
        (HEADER + b'{"tokens": 3}\n', "line 2"),
        (HEADER + b'{"tokens": 3, "seqs": 1, "more": 1}\n', "line 2"),
        (HEADER + b'{"tokens": "3", "seqs": 1}\n', "line 2"),
        (HEADER + b'{"tokens": 3, "seqs": true}\n', "line 2"),
        (HEADER + b'{"tokens": 3, "seqs": 4}\n', "line 2"),
        (HEADER + b'{"tokens": 0, "seqs": 0}\n', "line 2"),
        (HEADER + b'{"tokens": 51, "seqs": 1}\n', "line 2"),
        (HEADER + b'{"tokens": 50, "seqs": 9}\n', "line 2"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps\.jsonl"):
        read_trace(tmp_path / "steps.jsonl")
