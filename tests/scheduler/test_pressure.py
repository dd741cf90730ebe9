"""More work than the pool can hold: exact tokens, bounded waste, no leak, no stall."""

from __future__ import annotations

import random

import pytest

from tests.fakes import make_group, make_request
from tests.scheduler.harness import Harness

CACHING = pytest.mark.parametrize("caching", [True, False])


@CACHING
def test_long_prompts_do_not_evict_each_other_in_a_circle(caching: bool) -> None:
    harness = Harness(125, block_size=16, max_num_batched_tokens=256, enable_prefix_caching=caching)
    harness.run(*(make_request(f"r{i}", 1500, 50) for i in range(4)))
    assert harness.runner.num_computed <= 2 * harness.needed_tokens()


@CACHING
@pytest.mark.parametrize("seed", range(2))
def test_waste_stays_bounded_when_outputs_outgrow_the_pool(seed: int, caching: bool) -> None:
    """Everybody fits at first and nobody fits in the end."""
    rng = random.Random(seed)
    harness = Harness(
        60, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    harness.run(*(make_request(f"r{i}", rng.randint(5, 40), rng.randint(40, 120)) for i in range(40)))
    assert harness.stats().preemptions > 0
    assert harness.runner.num_computed <= 2 * harness.needed_tokens()


@CACHING
def test_overflow_while_decoding_changes_no_token(caching: bool) -> None:
    harness = Harness(
        100, block_size=8, max_num_seqs=16, max_num_batched_tokens=128, enable_prefix_caching=caching
    )
    singles = [make_request(f"r{i}", 100, 300, logprobs=0) for i in range(8)]
    harness.run(*singles, *make_group("g", 100, 2, 300))
    assert harness.stats().preemptions > 0
    assert all(r.num_output_tokens == 300 for r in harness.requests.values())


@CACHING
def test_a_chunked_prompt_arriving_at_a_full_pool_waits(caching: bool) -> None:
    for arrivals in (1, 2):
        harness = Harness(
            30, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, enable_prefix_caching=caching
        )
        decoding = [make_request(f"d{i}", 12, 34) for i in range(3)]
        harness.add(*decoding)
        while harness.scheduler._kv.pool.num_free > 1:
            harness.step()
            assert not any(request.is_finished for request in decoding)
        harness.run(*(make_request(f"late{i}", 44, 3) for i in range(arrivals)))
        assert not harness.errors


@CACHING
def test_survivors_of_random_aborts_are_exact(caching: bool) -> None:
    rng = random.Random(7)
    for round_number in range(4):
        harness = Harness(
            30, block_size=4, max_num_seqs=12, max_num_batched_tokens=24, enable_prefix_caching=caching
        )
        harness.add(*(make_request(f"r{round_number}.{i}", rng.randint(12, 36), 60) for i in range(12)))
        step = 0
        while harness.scheduler.has_unfinished:
            harness.step()
            step += 1
            living = [i for i, r in harness.requests.items() if not r.is_finished]
            if step % 9 == 0 and living:
                harness.scheduler.abort([rng.choice(living)])
                harness.check()
        harness.check_drained()
        assert harness.stats().preemptions > 0


def test_mass_aborts_of_an_overcommitted_pool_leave_nothing_behind() -> None:
    harness = Harness(64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256)
    rng = random.Random(3)
    for round_number in range(8):
        harness.add(*(make_request(f"r{round_number}.{i}", 100, 200) for i in range(40)))
        for _ in range(rng.randint(0, 40)):
            harness.step()
        living = [i for i, r in harness.requests.items() if not r.is_finished]
        rng.shuffle(living)
        harness.scheduler.abort(living)
        harness.check()
        harness.check_drained()
        harness.run(make_request(f"normal{round_number}", 20, 5))
    assert harness.stats().preemptions > 0


def test_a_request_of_the_whole_pool_that_is_abandoned_blocks_nobody() -> None:
    harness = Harness(16, block_size=4, max_num_batched_tokens=16)
    for number in range(20):
        harness.add(make_request(f"running{number}", 10, 10))
        harness.step()
        harness.add(make_request(f"big{number}", 63, 1))
        for _ in range(number % 5):
            harness.step()
        harness.scheduler.abort([f"big{number}:0"])
        harness.check()
        harness.run(make_request(f"after{number}", 10, 3))


@pytest.mark.parametrize("block_size", [1, 16])
def test_free_and_used_blocks_always_add_up(block_size: int) -> None:
    """A chunk of a few tokens, and each block freed by one path only."""
    harness = Harness(
        512 // block_size,
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=20,
        max_prefill_chunk=4,
    )
    for number in range(5):
        harness.run(make_request(f"solo{number}", 7, 60))
    harness.run(*(make_request(f"r{i}", 5 + i, 20) for i in range(16)))


@CACHING
def test_unique_prompts_at_the_limit_of_the_pool_are_exact(caching: bool) -> None:
    harness = Harness(
        40, block_size=4, max_num_seqs=16, max_num_batched_tokens=48, enable_prefix_caching=caching
    )
    harness.run(*(make_request(f"count{i}", 14, 25) for i in range(100)))
    assert harness.stats().preemptions > 0
    assert (harness.stats().evictions > 0) == caching
