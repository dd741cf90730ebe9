from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.retry_after import retry_after


@given(seconds=st.floats(0, 3600), seed=st.integers(0, 2**32))
def test_whole_seconds_never_too_early_and_not_much_too_late(seconds: float, seed: int) -> None:
    header = retry_after(seconds, random.Random(seed))
    assert header.isascii()
    assert header.isdigit()
    assert seconds <= int(header) <= 1.5 * seconds + 3
    assert int(header) >= 1
    assert header == retry_after(seconds, random.Random(seed)), "the source alone decides"


def test_clients_do_not_come_back_at_once() -> None:
    source = random.Random(1)
    for seconds in (0.0, 0.2, 3.0, 60.0):
        assert len({retry_after(seconds, source) for _ in range(100)}) > 1
