"""Preempted requests and evicted prefixes in host memory: what moves, when, and what never may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduler.block_moves import BlockMoves
from tests.fakes import make_group, make_request
from tests.scheduler.harness import Harness

BLOCK = 4


def pressed(host_blocks: int = 40, **config: object) -> tuple[Harness, Request]:
    """A background request of 24 + 8 tokens has run for a while; an important one needs most of the pool."""
    harness = Harness(16, host_blocks=host_blocks, **config)
    victim = make_request("victim", 24, 30, priority=1)
    harness.add(victim)
    while victim.num_output_tokens < 8:
        harness.step()
    harness.add(make_request("urgent", 40, 12))
    harness.step()
    assert victim.status is RequestStatus.WAITING
    return harness, victim


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_only_what_others_take_moves_and_only_that_comes_back(caching: bool, overlap: bool) -> None:
    harness, _ = pressed(enable_prefix_caching=caching, overlap=overlap)
    full = 7  # of 31 computed tokens
    swap = harness.stats().swap
    assert (swap.preemptions, swap.pinned_blocks) == (1, full)
    assert 0 < harness.runner.num_out < full, "some of its blocks are still free, and stay where they are"
    computed = harness.runner.num_computed
    harness.drain()
    harness.check_drained()
    assert harness.runner.num_in >= harness.runner.num_out if not caching else harness.runner.num_in > 0
    # The urgent one, the rest of the victim, and of its partly filled block what had been computed already.
    rest = 40 + 11 + 30 - 8
    assert harness.runner.num_computed - computed <= rest + BLOCK
    assert harness.stats().swap.requests_in == 1


def test_without_room_for_all_the_first_blocks_are_kept() -> None:
    """The last ones are the first that the device gives away, and are worth nothing without those before."""
    harness, victim = pressed(host_blocks=3)
    assert harness.stats().swap.pinned_blocks == 3
    tier = harness.scheduler._kv.swap.tier
    pinned = harness.scheduler._kv.swap._pins[victim.request_id]
    assert pinned == harness.scheduler._kv._chains[victim.request_id].digests[:3]
    harness.drain()
    harness.check_drained()
    assert tier.num_used <= 3


@pytest.mark.parametrize("caching", [True, False])
def test_an_abort_while_swapped_out_leaves_nothing(caching: bool) -> None:
    harness, victim = pressed(enable_prefix_caching=caching)
    harness.scheduler.abort([victim.request_id])
    harness.check()
    assert harness.stats().swap.pinned_blocks == 0
    assert caching or harness.stats().swap.used_blocks == 0
    harness.drain()
    harness.check_drained()


def test_what_failed_never_comes_back_from_host_memory() -> None:
    """Blocks that may hold NaN: of the request itself, when it fails after it was swapped out and in again."""
    harness, victim = pressed()
    tier, chain = harness.scheduler._kv.swap.tier, harness.scheduler._kv._chains[victim.request_id]
    assert any(tier.lookup(digest) is not None for digest in chain.digests)
    while victim.status is not RequestStatus.RUNNING:
        harness.step()
    harness.runner.failing = {victim.request_id}
    harness.step()
    assert victim.finish_reason is FinishReason.ERROR
    assert all(tier.lookup(digest) is None for digest in chain.digests)
    assert all(harness.scheduler._kv.pool.lookup(digest) is None for digest in chain.digests)
    harness.add(make_request("victim", 24, 4, index=1))
    harness.drain()
    assert harness.requests["victim:1"].num_cached_tokens == 0
    harness.check_drained()


@pytest.mark.parametrize("salt", [None, "other"])
def test_evicted_prefixes_are_found_in_host_memory_under_their_salt_only(salt: str | None) -> None:
    harness = Harness(8, host_blocks=20)
    prompt = list(range(25))
    harness.run(make_request("a", prompt, 2))
    harness.run(make_request("b", 28, 3))
    assert harness.runner.num_out > 0
    harness.run(make_request("c", [*prompt, 99], 2, salt=salt))
    assert harness.requests["c:0"].num_cached_tokens == (24 if salt is None else 0)


def test_without_prefix_caching_nothing_is_shared() -> None:
    """Not even by one who asks the same while the first one's blocks lie in host memory."""
    harness, victim = pressed(enable_prefix_caching=False)
    twin = make_request("twin", victim.prompt_token_ids, 3)
    harness.add(twin)
    harness.drain()
    assert twin.num_cached_tokens == 0
    harness.check_drained()


def test_choices_share_what_was_swapped_out() -> None:
    """All choices are preempted in the middle; what they have in common goes out once, and comes in for all."""
    harness = Harness(20, host_blocks=60, max_num_seqs=6)
    harness.add(*make_group("group", 18, 3, 12, priority=1))
    while any(r.num_output_tokens < 4 for r in harness.requests.values()):
        harness.step()
    harness.add(make_request("urgent", 70, 6))
    harness.step()
    assert harness.stats().swap.preemptions == 3
    assert 0 < harness.runner.num_out <= 4 + 3 * 2
    harness.drain()
    harness.check_drained()


def test_prompt_logprobs_that_are_still_to_come_are_computed() -> None:
    harness = Harness(10, host_blocks=40, max_num_batched_tokens=8, max_prefill_chunk=8)
    scored = make_request("scored", 30, 4, priority=1, prompt_logprobs=0)
    harness.add(scored)
    harness.step()
    harness.step()
    harness.add(make_request("urgent", 30, 4))
    harness.drain()
    assert harness.stats().swap.preemptions == 1
    harness.check_drained()


class Turns:
    """Priorities that make everybody preempt everybody, again and again."""

    def __init__(self, harness: Harness, sizes: list[tuple[int, int]], waves: list[int]) -> None:
        self.harness = harness
        self.sizes = sizes
        self.waves = waves

    def run(self) -> None:
        for number, ((prompt, output), wait) in enumerate(zip(self.sizes, self.waves, strict=True)):
            self.harness.add(make_request(f"r{number}", prompt, output, priority=-number))
            for _ in range(wait):
                self.harness.step()
        self.harness.drain()
        self.harness.check_drained()


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(3, 9),
    host_blocks=st.sampled_from([1, 2, 5, 12, 100]),
    caching=st.booleans(),
    overlap=st.booleans(),
    lives=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 6)), min_size=2, max_size=7
    ),
)
def test_everybody_ends_although_all_are_preempted_in_turn(
    blocks: int, host_blocks: int, caching: bool, overlap: bool, lives: list[tuple[int, int, int]]
) -> None:
    """Progress: never more steps than every request's tokens one by one, and one for each preemption."""
    harness = Harness(
        blocks,
        vocab=11,
        host_blocks=host_blocks,
        block_size=3,
        enable_prefix_caching=caching,
        overlap=overlap,
        max_num_batched_tokens=8,
    )
    capacity = blocks * 3
    sizes = [(min(p, capacity - 1), min(o, capacity - min(p, capacity - 1))) for p, o, _ in lives]
    Turns(harness, sizes, [wait for *_, wait in lives]).run()
    preemptions = harness.stats().preemptions
    waits = sum(wait for *_, wait in lives)
    # A preempted one computes at most its own tokens again, eight a step; the first in order is never preempted.
    again = preemptions * (capacity // 4 + 2)
    assert harness.num_steps <= waits + sum(p + o + 1 for p, o in sizes) + again
    wasted = harness.runner.num_computed - harness.needed_tokens()
    assert wasted <= preemptions * capacity
    if (
        host_blocks == 100
    ):  # ample: only partly filled blocks are computed again, and the step that overlap throws away
        assert wasted <= preemptions * (3 + 8 * overlap)


def test_no_block_comes_in_to_where_a_copy_of_the_same_plan_reads() -> None:
    """Copies run last, so their source must not be overwritten before: such a block is computed instead."""
    harness = Harness(8, host_blocks=20)
    prompt = list(range(25))
    harness.run(make_request("a", prompt, 2))
    harness.run(make_request("b", 28, 3))
    kv = harness.scheduler._kv
    request = make_request("c", prompt, 2)
    reuse = kv.find_reusable(request, limit=24)
    assert len(reuse.host_digests) > 3
    due = kv.pool.free_ids()[2]  # the third to be handed out, as no free block before it is among the hits
    assert not set(kv.pool.free_ids()[:3]) & set(reuse.block_ids)
    kv.swap.moves.copies[99] = due
    reused = kv.admit(request, reuse, 26)
    assert reused == (len(reuse.block_ids) + 2) * BLOCK
    assert due not in kv.swap.moves.ins
    assert len(kv.swap.moves.ins) == 2


def test_who_is_given_a_block_gets_nothing_of_who_had_it_in_the_same_plan() -> None:
    moves = BlockMoves(ins={5: 1, 6: 2}, copies={7: 3})
    moves.handed_out([6, 7, 8])
    assert (moves.ins, moves.copies) == ({5: 1}, {})
    moves.take_out(10, 0)
    moves.take_out(11, 1)
    moves.take_out(12, 0)  # the host block changed hands twice
    assert list(moves.outs.items()) == [(1, 11), (0, 12)]
