from __future__ import annotations

import io
import threading

import pytest

from jaxserve.progress import BarProgress, NullProgress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_lines(steps: int, seconds_a_step: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with BarProgress(stream, clock=clock) as progress:
        for done in range(steps + 1):
            progress("loading weights", done, steps)
            clock.now += seconds_a_step
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("steps", [1, 7, 10_000])
@pytest.mark.parametrize("seconds_a_step", [0.0, 0.5, 30.0])
def test_a_log_gets_few_lines_a_phase_however_many_steps_it_has(steps: int, seconds_a_step: float) -> None:
    lines = plain_lines(steps, seconds_a_step)
    assert len(lines) <= 11
    assert lines[0] == "loading weights ..."
    assert lines[-1].startswith("loading weights: ")
    assert lines[-1].endswith(f"{steps}/{steps} in {steps * seconds_a_step:.1f} s")
    assert "\x1b" not in "".join(lines)


def test_a_slow_phase_shows_how_far_it_is() -> None:
    lines = plain_lines(100, 3.0)
    assert [line for line in lines if "50%" in line] == ["loading weights: 50% (50/100)"]


@pytest.mark.parametrize("interactive", [False, True])
def test_totals_may_be_unknown_or_change_and_phases_may_overlap(interactive: bool) -> None:
    stream = io.StringIO()
    with BarProgress(stream, interactive=interactive) as progress:
        progress("[pull] model.gguf", 5, 0)
        progress("compiling", 0, 3)
        progress("[pull] model.gguf", 2_500_000, 91_000_000)
        progress("compiling", 3, 3)
        progress("[pull] model.gguf", 91_000_000, 91_000_000)
        progress("compiling", 1, 2)  # the same phase again, left unfinished
    text = stream.getvalue()
    assert "[pull] model.gguf" in text  # not swallowed as markup
    assert "91.0M/91.0M" in text


def test_the_terminal_is_left_in_order_after_an_error() -> None:
    stream = io.StringIO()
    progress = BarProgress(stream, interactive=True)

    def work() -> None:
        with progress:
            progress("converting", 1, 4)
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        work()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    text = stream.getvalue()
    assert text.rfind(hidden) < text.rfind(shown), "the cursor is still hidden"
    progress.close()


def test_a_finished_phase_leaves_no_live_display_behind() -> None:
    """Whoever forgets the context manager must not find later output garbled."""
    before = set(threading.enumerate())
    progress = BarProgress(io.StringIO(), interactive=True)
    for done in range(4):
        progress("compiling", done, 3)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # told to end by now
        assert not thread.is_alive()


def test_may_be_called_from_any_thread() -> None:
    stream = io.StringIO()
    with BarProgress(stream) as progress:
        threads = [
            threading.Thread(target=lambda name=name: [progress(name, i, 200) for i in range(201)])
            for name in ("a", "b", "c", "d")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ends = [line for line in stream.getvalue().splitlines() if "200/200" in line]
    assert sorted(line[0] for line in ends) == ["a", "b", "c", "d"]


def test_null_progress_is_usable_in_the_same_ways(capfd: pytest.CaptureFixture[str]) -> None:
    with NullProgress() as progress:
        progress("anything", 0, 0)
    assert capfd.readouterr() == ("", "")
