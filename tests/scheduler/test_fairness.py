"""Nobody waits for ever, and nobody waits much longer than needed: measured in steps, never in seconds."""

from __future__ import annotations

import random

import pytest

from jaxserve.request import RequestStatus
from tests.fakes import make_request
from tests.scheduler.harness import Harness, rows


def test_running_streams_get_a_token_in_every_step_whatever_arrives() -> None:
    harness = Harness(2000, max_num_seqs=8, max_num_batched_tokens=32)
    stream = make_request("stream", 5, 500)
    harness.add(stream)
    harness.step()
    for number in range(300):
        if number % 5 == 0:
            harness.add(make_request(f"p{number}", 150, 2))
        before = stream.num_output_tokens
        harness.step()
        assert stream.num_output_tokens == before + 1
    assert sum(r.is_finished for r in harness.requests.values()) >= 50


def test_a_very_long_prompt_hardly_delays_short_ones() -> None:
    harness = Harness(300, block_size=32, max_num_seqs=16, max_num_batched_tokens=256)
    long = make_request("long", 7500, 1)
    harness.add(long)
    harness.step()
    shorts = [make_request(f"s{i}", 10, 1) for i in range(10)]
    harness.add(*shorts)
    harness.step()
    assert all(short.is_finished for short in shorts)
    assert not long.is_finished
    assert harness.drain() <= 7500 / 256 + 1


def test_short_ones_at_full_load_do_not_starve_a_long_one() -> None:
    harness = Harness(2000, max_num_seqs=16, max_num_batched_tokens=64)
    number = 0
    long = make_request("long", 3000, 1)
    for step in range(500):
        while harness.scheduler.num_waiting < 20:  # more than can ever be served
            harness.add(make_request(f"s{number}", 20, 3))
            number += 1
        if step == 10:
            harness.add(long)
        harness.step()
        if long.is_finished:
            break
    assert long.is_finished
    assert step - 10 <= 4 * 3000 / 64 + 50
    harness.scheduler.abort(list(harness.requests))


def test_long_ones_at_full_load_do_not_starve_short_ones() -> None:
    harness = Harness(3000, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(10):
        harness.add(make_request(f"l{number}", 1000, 2))
    for _ in range(3):
        harness.step()
    for number in range(20):
        short = make_request(f"s{number}", 20, 1)
        harness.add(short)
        steps = 0
        while not short.is_finished:
            harness.step()
            steps += 1
        assert steps <= 2
    harness.drain()
    harness.check_drained()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_the_tightest_budget_serves_both_kinds(max_num_seqs: int) -> None:
    """One token a step and sequence: long and short prompts alternate as they came."""
    harness = Harness(
        100, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs, max_prefill_chunk=1
    )
    requests = [make_request(f"r{i}", 1 if i % 2 else 6, 2) for i in range(10)]
    harness.add(*requests)
    order: list[str] = []
    while harness.scheduler.has_unfinished:
        harness.step()
        order += [r.request_id for r in requests if r.is_finished and r.request_id not in order]
    harness.check_drained()
    if max_num_seqs == 1:
        assert order == [r.request_id for r in requests]


def test_a_head_that_lacks_blocks_is_not_passed_by_later_equals() -> None:
    harness = Harness(20, max_num_seqs=8, max_num_batched_tokens=64)
    harness.add(make_request("hog", 40, 20))
    harness.step()
    big = make_request("big", 60, 1)
    harness.add(big, *(make_request(f"s{i}", 3, 30) for i in range(20)))
    while big.status is RequestStatus.WAITING:
        assert next(iter(rows(harness.step()))) in ("hog:0", "big:0")
        assert harness.scheduler.num_running <= 1 or big.status is RequestStatus.RUNNING
    harness.drain()
    harness.check_drained()


@pytest.mark.parametrize("chunk", [1, 3, 8, 32])
@pytest.mark.parametrize("budget", [8, 32, 128])
def test_any_chunk_size_gives_the_same_tokens(budget: int, chunk: int) -> None:
    rng = random.Random(budget * 100 + chunk)
    harness = Harness(
        600, max_num_seqs=8, max_num_batched_tokens=budget, max_prefill_chunk=min(chunk, budget), block_size=8
    )
    harness.run(*(make_request(f"r{i}", rng.randint(1, 200), rng.randint(1, 10)) for i in range(25)))


def test_more_requests_than_slots_wait_and_are_all_served() -> None:
    rng = random.Random(1)
    for count in (3, 4, 5, 8, 16):
        harness = Harness(200, max_num_seqs=4)
        harness.add(*(make_request(f"a{i}", 5, rng.randint(1, 64)) for i in range(count)))
        for _ in range(20):
            plan = harness.step()
            assert len(plan.scheduled) <= 4
            assert harness.scheduler.num_running <= 4
        harness.run(*(make_request(f"b{i}", 5, rng.randint(1, 64)) for i in range(count)))


def test_requests_that_all_end_with_their_prompt_leave_the_door_open() -> None:
    harness = Harness(200, max_num_seqs=4, max_num_batched_tokens=16)
    for wave in range(20):
        harness.run(*(make_request(f"w{wave}.{i}", 4, 1) for i in range(64)))
    last = make_request("last", 4, 5)
    harness.add(last)
    assert rows(harness.step()) == {"last:0": 4}


def test_a_reused_slot_is_marked_for_reloading_even_when_all_is_cached() -> None:
    harness = Harness(60, max_num_seqs=1, max_num_batched_tokens=64)
    for length in (16, 17):
        prompt = list(range(length))
        for turn in range(5):
            for request in (
                make_request(f"other{length}.{turn}", 9, 3),
                make_request(f"p{length}.{turn}", prompt, 6),
            ):
                harness.add(request)
                flags = []
                while not request.is_finished:
                    flags += [item.is_new for item in harness.step().scheduled]
                assert flags == [True] + [False] * (len(flags) - 1)
    harness.check_drained()
