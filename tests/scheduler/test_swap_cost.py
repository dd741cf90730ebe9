from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.outputs import BlockTransfers
from jaxserve.scheduler.step_time import StepTimeModel, StepWork
from jaxserve.scheduler.swap_cost import SwapCost

BLOCK_BYTES, BLOCK_SIZE = 10**6, 10


def make(seconds_per_token: float | None, chunk: int = 50) -> SwapCost:
    model = StepTimeModel(lambda tokens, seqs: (tokens, seqs))
    if seconds_per_token is not None:
        for tokens in range(1, 60):
            model.observe(StepWork(tokens, 1), tokens * seconds_per_token)
    return SwapCost(BLOCK_BYTES, BLOCK_SIZE, chunk, model)


def moved(out_seconds: float, in_seconds: float) -> BlockTransfers:
    """Of a block each way."""
    return BlockTransfers(BLOCK_BYTES, out_seconds, BLOCK_BYTES, in_seconds)


def test_before_anything_is_measured_blocks_are_moved() -> None:
    assert make(None).moving_is_cheaper(1000, 1000, 1)


def test_until_a_transfer_is_measured_a_slow_link_is_assumed() -> None:
    """2 ms for a block there and back at 1 GB/s; ten tokens."""
    assert make(250e-6).moving_is_cheaper(1, 1, BLOCK_SIZE)
    assert not make(150e-6).moving_is_cheaper(1, 1, BLOCK_SIZE)
    assert make(150e-6).moving_is_cheaper(0, 1, BLOCK_SIZE), "it is there already"


@given(
    blocks=st.integers(1, 30),
    out=st.floats(1e-4, 1e-1),
    back=st.floats(1e-4, 1e-1),
    token=st.floats(1e-5, 1e-2),
)
def test_the_cheaper_way_is_taken(blocks: int, out: float, back: float, token: float) -> None:
    cost = make(token)
    cost.observe(moved(out, back))
    moving, computing = blocks * (out + back), blocks * BLOCK_SIZE * token
    if not 0.95 < moving / computing < 1.05:  # the step times are fitted
        assert cost.moving_is_cheaper(blocks, blocks, blocks * BLOCK_SIZE) == (moving < computing)


def test_rates_follow_what_is_measured() -> None:
    cost = make(None)
    cost.observe(moved(0.01, 0.1))
    assert (cost.out_rate, cost.in_rate) == (1e8, pytest.approx(1e7))
    for _ in range(40):
        cost.observe(BlockTransfers(BLOCK_BYTES, 0.001))
        cost.observe(BlockTransfers())
    assert cost.out_rate == pytest.approx(1e9, rel=0.01)
    assert cost.in_rate == pytest.approx(1e7), "nothing came in"


def test_a_link_that_got_better_is_found_out() -> None:
    """Nothing is measured while everything is computed, so now and then something is moved all the same."""
    cost = make(1e-4)
    cost.observe(moved(1.0, 1.0))
    answers = [cost.moving_is_cheaper(1, 1, BLOCK_SIZE) for _ in range(200)]
    assert answers.count(True) == 3
