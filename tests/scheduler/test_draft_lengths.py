"""The number of drafts that makes a step yield most tokens a second, against trying all numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler.draft_lengths import Candidate, best_lengths, best_rounds
from jaxserve.scheduler.draft_times import DraftTimes

CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5, 0.6, 0.9, 1.0]), st.booleans()),
    max_size=4,
)


def yielded(candidates: list[Candidate], lengths: tuple[int, ...] | list[int], num_rows: int) -> float:
    gains = (
        c.acceptance**place
        for c, length in zip(candidates, lengths, strict=True)
        for place in range(1, length + 1)
    )
    return num_rows + sum(gains)


@settings(max_examples=200)
@given(CANDIDATES, st.integers(0, 12), st.integers(0, 5), st.lists(st.floats(0, 1), min_size=17, max_size=17))
def test_no_choice_is_much_better(
    candidates: list[Candidate], room: int, more_rows: int, steps: list[float]
) -> None:
    times = list(itertools.accumulate(steps, initial=0.3))  # any steps time, as long as it never falls
    num_rows = len(candidates) + more_rows
    lengths = best_lengths(candidates, room=room, num_rows=num_rows, seconds=lambda count: times[count])
    assert sum(lengths) <= room
    assert all(0 <= length <= c.num_drafts for c, length in zip(candidates, lengths, strict=True))
    left = room
    for c, length in zip(candidates, lengths, strict=True):
        if c.is_fixed:
            assert length == min(c.num_drafts, left)
            left -= length
    rate = yielded(candidates, lengths, num_rows) / times[sum(lengths)] if num_rows else 0.0
    choices = [
        [length] if c.is_fixed else range(c.num_drafts + 1)
        for c, length in zip(candidates, lengths, strict=True)
    ]
    for other in itertools.product(*choices):
        if sum(other) <= room and num_rows:
            assert yielded(candidates, other, num_rows) / times[sum(other)] <= 1.021 * rate


def test_what_is_not_known_is_not_risked() -> None:
    free, fixed = Candidate(3, 1.0), Candidate(2, 0.0, is_fixed=True)
    assert best_lengths([free, fixed], room=9, num_rows=2, seconds=lambda count: None) == [0, 2]


@given(CANDIDATES, st.integers(0, 12), st.integers(0, 8))
def test_no_more_than_fits_is_added_to_what_is_fixed(
    candidates: list[Candidate], room: int, most: int
) -> None:
    free = best_lengths(candidates, room=room, num_rows=4, seconds=lambda count: 1.0)
    lengths = best_lengths(
        candidates, room=room, num_rows=4, seconds=lambda count: 1.0, fits=lambda count: count <= most
    )
    fixed = sum(length for c, length in zip(candidates, lengths, strict=True) if c.is_fixed)
    assert sum(lengths) <= max(most, fixed)
    assert lengths == free or sum(free) > most


@pytest.mark.parametrize(("most_seconds", "want"), [(1.05, 0), (1.15, 1), (1.25, 2), (9.0, 4)])
def test_drafting_and_its_step_stay_within_a_bound(most_seconds: float, want: int) -> None:
    found = best_rounds(
        [Candidate(4, 1.0)],
        num_rows=1,
        seconds=lambda count: 1.0,
        drafting_seconds=lambda rounds: 0.1 * rounds,
        most_seconds=most_seconds,
    )
    assert found == want


@pytest.mark.parametrize(("cost", "want"), [(0.0, 3), (1.0, 0)])
def test_padding_is_free_and_rows_that_cost_too_much_are_not_taken(cost: float, want: int) -> None:
    candidates = [Candidate(3, 0.5)]
    assert best_lengths(candidates, room=9, num_rows=1, seconds=lambda count: 1 + cost * count) == [want]


@given(
    st.lists(
        st.builds(Candidate, st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.8, 1.0])), min_size=1, max_size=3
    ),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_drafting_has_to_pay_for_itself(candidates: list[Candidate], row: float, each: float) -> None:
    def rate(rounds: int) -> float:
        lengths = [min(rounds, candidate.num_drafts) for candidate in candidates]
        return yielded(candidates, lengths, len(candidates)) / (1 + row * sum(lengths) + each * rounds)

    best = best_rounds(
        candidates,
        num_rows=len(candidates),
        seconds=lambda count: 1 + row * count,
        drafting_seconds=lambda rounds: each * rounds,
    )
    assert all(rate(rounds) <= 1.021 * rate(best) for rounds in range(5))
    assert best == 0 or rate(best) > rate(0)


def test_drafting_is_probed_now_and_then() -> None:
    times = DraftTimes()
    assert times.seconds(3, 2) is None
    times.observe(3, 4, 2.0)
    assert times.seconds(4, 2) == 1.0
    assert times.seconds(5, 1) is None, "five rows are another size"
    for _ in range(3):
        probes = 0
        while not times.is_time_to_probe():
            probes += 1
        assert probes == 64
        times.observe(3, 4, 2.0)
