from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.distribution import Distribution
from jaxserve.request_stats import token_bounds

BOUNDS = (0.5, 1.0, 2.0, 8.0)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20))


@given(st.lists(st.tuples(VALUES, st.integers(1, 5))))
def test_every_class_holds_what_is_no_larger(values: list[tuple[float, int]]) -> None:
    distribution = Distribution(BOUNDS)
    for value, times in values:
        distribution.observe(value, times)
    every = [value for value, times in values for _ in range(times)]
    assert distribution.cumulative() == [
        *((repr(bound), sum(value <= bound for value in every)) for bound in BOUNDS),
        ("+Inf", len(every)),
    ]
    assert distribution.count == len(every)
    assert distribution.total == pytest.approx(sum(every))


def test_bounds_of_lengths() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(49) == (1, 2, 5, 10, 20)
    assert token_bounds(131_072)[-1] == 100_000
