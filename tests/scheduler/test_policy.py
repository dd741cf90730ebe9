"""How a step's token budget is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.policy import ChunkedPrefillPolicy, PrefillBudget

UNCOMPUTED = st.lists(st.integers(1, 60), max_size=8)


@given(uncomputed=UNCOMPUTED, budget=st.integers(0, 80), chunk=st.integers(1, 40))
def test_no_token_of_the_budget_is_wasted_or_invented(uncomputed: list[int], budget: int, chunk: int) -> None:
    grants = ChunkedPrefillPolicy(chunk).divide(uncomputed, budget)
    assert all(0 <= grant <= count for grant, count in zip(grants, uncomputed, strict=True))
    assert sum(grants) == min(budget, sum(uncomputed))


@given(uncomputed=UNCOMPUTED, budget=st.integers(2, 80), chunk=st.integers(1, 40))
def test_neither_kind_starves(uncomputed: list[int], budget: int, chunk: int) -> None:
    grants = ChunkedPrefillPolicy(chunk).divide(uncomputed, budget)
    longs = [i for i, count in enumerate(uncomputed) if count > chunk]
    shorts = [i for i, count in enumerate(uncomputed) if count <= chunk]
    if longs:
        assert grants[longs[0]] >= min(chunk, budget // 2)
    if shorts:
        short_tokens = sum(uncomputed[i] for i in shorts)
        assert sum(grants[i] for i in shorts) >= min(short_tokens, budget // 2)


@pytest.mark.parametrize(
    ("uncomputed", "grants"),
    [
        ([500], [100]),  # alone: everything
        ([500, 10, 10], [80, 10, 10]),  # short ones are served, the rest goes to the long one
        ([500, 40, 40], [50, 40, 10]),  # a full step: half to the lane
        ([10, 500, 40, 40], [10, 50, 40, 0]),
        ([500, 500], [100, 0]),  # one long at a time
        ([60, 500], [60, 40]),  # and the next one in the step in which it ends
        ([500, 500, 30], [70, 0, 30]),
        ([10, 20], [10, 20]),
    ],
)
def test_division_by_hand(uncomputed: list[int], grants: list[int]) -> None:
    assert ChunkedPrefillPolicy(50).divide(uncomputed, 100) == grants


def test_room_is_kept_for_a_long_one_about_to_be_admitted() -> None:
    budget = PrefillBudget(ChunkedPrefillPolicy(50), 100)
    budget.add((0, 0, 0), 50)
    assert budget.admits_short(long_waits=False)
    assert not budget.admits_short(long_waits=True)


def test_the_lane_passes_to_a_higher_priority_only() -> None:
    budget = PrefillBudget(ChunkedPrefillPolicy(50), 100)
    budget.add((1, 5, 5), 500)
    assert budget.admits_long((0, 9, 9))
    assert not budget.admits_long((1, 9, 9))


def test_a_single_token_of_budget_goes_to_the_first_in_the_queue() -> None:
    budget = PrefillBudget(ChunkedPrefillPolicy(1), 1)
    assert budget.admits_short(long_waits=True)
