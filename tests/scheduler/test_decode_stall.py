"""No stream waits longer between two tokens than its target because of others' prompts, and prompts still advance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import ServiceTargets
from jaxserve.scheduler.decode_stall import MIN_PREFILL_TOKENS, largest_within
from tests.fakes import make_request
from tests.scheduler.virtual_clock import VirtualRun


@given(
    budget=st.integers(1, 3000),
    fixed=st.floats(0.0, 0.1),
    each=st.floats(1e-5, 1e-2),
    limit=st.floats(0.0, 3.0),
)
def test_the_largest_budget_that_fits(budget: int, fixed: float, each: float, limit: float) -> None:
    def seconds(tokens: int) -> float:
        return fixed + each * tokens

    found = largest_within(seconds, limit, budget)
    floor = min(MIN_PREFILL_TOKENS, budget)
    assert floor <= found <= budget
    assert found == floor or seconds(found) <= limit
    assert found == budget or seconds(found + 1) > limit


def test_nothing_is_cut_while_nothing_is_known() -> None:
    assert largest_within(lambda tokens: None, 0.0, 500) == 500


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), target=st.floats(0.05, 0.2), chunk=st.sampled_from([16, 100, 256]))
def test_gaps_of_a_stream_stay_within_its_target(seed: int, target: float, chunk: int) -> None:
    """With exact step times. Only the floor may make a step longer."""
    rng = random.Random(seed)
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=256, max_prefill_chunk=chunk)
    stream = make_request("stream", 10, 60, targets=ServiceTargets(itl_seconds=target))
    run.add(stream)
    run.step()
    while not stream.is_finished:
        if rng.random() < 0.3:
            run.add(make_request(f"p{rng.random()}", rng.choice([5, 60, 700]), rng.randint(1, 20)))
        before = run.now
        plan = run.step()
        chunks = [row for row in plan.scheduled if row.num_scheduled_tokens > 1]
        at_floor = sum(row.num_scheduled_tokens for row in chunks) <= MIN_PREFILL_TOKENS
        assert run.now - before <= target + 1e-9 or at_floor
    assert run.gaps["stream:0"]
    run.run()  # and everybody else is served


def test_only_streams_with_a_target_cut_and_only_while_they_run() -> None:
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=256)
    run.add(make_request("plain", 10, 100))
    picky = make_request("picky", 10, 5, targets=ServiceTargets(itl_seconds=0.08))
    run.add(picky)
    run.step()
    run.add(make_request("p", 2000, 1))
    sizes = []
    while not picky.is_finished:
        sizes.append(run.step().num_scheduled_tokens)
    assert all(MIN_PREFILL_TOKENS < size < 70 for size in sizes)
    assert run.stats().stall_cuts == len(sizes)
    assert run.step().num_scheduled_tokens == 256
    assert run.stats().stall_cuts == len(sizes)


def test_a_target_that_cannot_be_met_leaves_prompts_the_floor() -> None:
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=256)
    run.add(make_request("picky", 10, 500, targets=ServiceTargets(itl_seconds=1e-6)))
    run.step()
    long = make_request("p", 400, 1)
    run.add(long)
    steps = 0
    while not long.is_finished:
        assert run.step().num_scheduled_tokens <= 1 + MIN_PREFILL_TOKENS
        steps += 1
    assert steps == pytest.approx(400 / MIN_PREFILL_TOKENS, abs=1)


def test_a_request_does_not_slow_its_own_prompt() -> None:
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=256)
    run.add(make_request("picky", 500, 5, targets=ServiceTargets(itl_seconds=0.05)))
    assert run.step().num_scheduled_tokens == 256


@pytest.mark.parametrize(("target", "want"), [(None, 3), (0.0237, 2), (0.0225, 1), (0.0215, 0), (0.01, 3)])
def test_drafts_make_no_step_longer_than_a_stream_beside_can_live_with(
    target: float | None, want: int
) -> None:
    """The step takes 21 ms without drafts, and 1.2 ms more for each. 10 ms can't be had, so they go by their gain."""
    run = VirtualRun(
        max_num_seqs=16, max_num_batched_tokens=64, speculative="ngram", num_speculative_tokens=8
    )
    run.add(make_request("stream", 10, 60, targets=ServiceTargets(itl_seconds=target)))
    run.step()
    wanted = run.scheduler.plan_drafts()
    assert [item.num_tokens for item in wanted] == [8]
    run.scheduler.take_drafts(wanted, [(7,) * 8])
    (row,) = run.scheduler.schedule(run.now).scheduled
    assert len(row.draft_token_ids) == want
