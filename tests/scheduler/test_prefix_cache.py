"""Prefix hits, copy-on-write and siblings, seen from the scheduler."""

from __future__ import annotations

import pytest

from jaxserve.request import FinishReason, RequestStatus
from tests.fakes import make_group, make_request, solo_tokens
from tests.scheduler.harness import Harness, rows


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_a_second_request_reuses_full_blocks_and_computes_at_least_one_token(length: int) -> None:
    harness = Harness(60, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(100, 100 + length))
    first, second = make_request("first", prompt), make_request("second", prompt)
    harness.run(first)
    harness.run(second)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // 4 * 4
    stats = harness.stats()
    assert stats.prefix_cache_queries == 2 * length
    assert stats.prefix_cache_hits == stats.cached_prompt_tokens == (length - 1) // 4 * 4


def test_answers_are_cached_too_for_the_next_turn() -> None:
    harness = Harness(60, block_size=4, max_num_batched_tokens=64)
    first = make_request("first", 10, 9)
    harness.run(first)
    second = make_request("second", [*first.prompt_token_ids, *first.output_token_ids, 5, 6])
    harness.run(second)
    assert second.num_cached_tokens == 16  # of 18 computed ones: the last sampled token never is


def test_only_computed_and_accepted_blocks_can_be_hit() -> None:
    harness = Harness(60, block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    prompt = list(range(24))
    harness.add(make_request("first", prompt))
    plan = harness.scheduler.schedule(0.0)
    assert harness.scheduler._kv.pool.num_cached == 0
    harness.scheduler.update_from_output(plan, harness.runner.run(plan))
    assert harness.scheduler._kv.pool.num_cached == 2


def test_two_that_compute_the_same_prompt_at_once_both_get_it_right() -> None:
    harness = Harness(60, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(18))
    harness.run(make_request("a", prompt, 12), make_request("b", prompt, 12))
    assert harness.scheduler._kv.pool.num_cached == (18 + 11) // 4


def test_hits_stay_within_a_salt() -> None:
    harness = Harness(200, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(17))
    cached = []
    for number, salt in enumerate(["x", "y", None, "x", "", None, "y" * 10_000, "y"]):
        request = make_request(f"r{number}", prompt, salt=salt)
        harness.run(request)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 16, 0, 16, 0, 16]


def test_different_tokens_never_hit() -> None:
    harness = Harness(300, block_size=2, max_num_batched_tokens=64)
    prompts = [
        [1, 2, 3, 4, 5],
        [2, 1, 3, 4, 5],
        [12, 3, 4, 5, 6],
        [1, 23, 4, 5, 6],
        [3, 4, 1, 2, 5],
        [1, 2, 4, 3, 5],
    ]
    cached = []
    for number, prompt in enumerate(prompts):
        request = make_request(f"r{number}", prompt)
        harness.run(request)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 0, 0, 2]


def test_prompt_logprobs_never_read_the_cache_but_fill_it() -> None:
    harness = Harness(100, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(70))
    lengths = [70, 70, 33, 32, 31, 17, 16]
    for number, length in enumerate(lengths):
        request = make_request(f"r{number}", prompt[:length], prompt_logprobs=0)
        harness.run(request)  # checks that every position is scored once
        assert request.num_cached_tokens == 0
    plain = make_request("plain", prompt)
    harness.run(plain)
    assert plain.num_cached_tokens == 68
    harness.run(make_request("after", prompt, prompt_logprobs=0))
    assert harness.requests["after:0"].num_cached_tokens == 0


def test_prompt_logprobs_are_delivered_once_across_preemptions() -> None:
    preemptions = 0
    for caching in (True, False):
        harness = Harness(
            9, block_size=2, max_num_seqs=5, max_num_batched_tokens=7, enable_prefix_caching=caching
        )
        harness.add(make_request("old", 4, 13))
        for _ in range(3):
            harness.step()
        harness.run(*(make_request(f"r{i}", 6 + i, 8, prompt_logprobs=2) for i in range(4)))
        preemptions += sum(r.num_preemptions for r in harness.requests.values())
    assert preemptions > 0


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    harness = Harness(9, block_size=2, max_num_seqs=5, max_num_batched_tokens=12)
    requests = [make_request(f"r{i}", 4, 13) for i in range(5)]
    harness.run(*requests)
    assert any(r.num_preemptions for r in requests)
    assert [r.num_cached_tokens for r in requests] == [0] * 5


def test_a_hit_survives_an_admission_that_evicts_everything_else() -> None:
    """The blocks just matched are free ones, and must not be handed out as new ones in the same admission."""
    harness = Harness(20, block_size=4, max_num_batched_tokens=200)
    a = list(range(40))
    harness.run(make_request("a", a, 1))
    b = make_request("b", a + list(range(500, 540)), 1)
    harness.run(b)
    assert b.num_cached_tokens == 40
    harness.run(make_request("filler", 22, 1))
    again = make_request("again", a, 1)
    harness.run(again)
    assert again.num_cached_tokens == 36


def test_what_is_left_of_an_evicted_prefix_is_its_beginning() -> None:
    harness = Harness(12, block_size=4, max_num_batched_tokens=200)
    a = list(range(40))
    harness.run(make_request("a", a, 1))
    harness.run(make_request("other", 24, 1))  # 2 blocks were plain; 4 of the 10 go
    again = make_request("again", a, 1)
    harness.run(again)
    assert again.num_cached_tokens == 24
    assert harness.stats().evictions >= 4


def test_cached_blocks_never_stop_a_request_that_needs_the_pool() -> None:
    harness = Harness(100, block_size=4, max_num_batched_tokens=400)
    for number in range(30):
        harness.run(make_request(f"r{number}", 32, 1))
    harness.run(make_request("big", 360, 1))
    assert harness.stats().evictions > 0


def test_matches_that_cannot_start_hold_nothing() -> None:
    harness = Harness(24, block_size=4, max_num_batched_tokens=200, max_num_seqs=30)
    prefix = list(range(32))
    harness.run(make_request("warm", prefix, 1))
    harness.add(make_request("hog", 60, 5))
    harness.step()
    waiting = [make_request(f"w{i}", [*prefix, i], 2) for i in range(20)]
    harness.add(*waiting)
    for _ in range(3):
        harness.step()
        held = [b for b in range(1, 25) if harness.scheduler._kv.pool.ref_count(b)]
        assert len(held) == 16  # the hog alone
    harness.scheduler.abort([r.request_id for r in waiting[::2]])
    harness.drain()
    harness.check_drained()
    assert all(r.num_cached_tokens == 32 for r in waiting[1::2])


def test_turned_off_it_finds_nothing() -> None:
    harness = Harness(60, enable_prefix_caching=False)
    prompt = list(range(20))
    harness.run(make_request("a", prompt))
    harness.run(make_request("b", prompt))
    assert harness.requests["b:0"].num_cached_tokens == 0
    assert harness.stats().prefix_cache_queries == 0


# Siblings.


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 7, 8, 9, 30])
def test_siblings_compute_the_prompt_once(length: int, caching: bool) -> None:
    harness = Harness(
        80, block_size=4, max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=caching
    )
    members = make_group("g", length, 4, 6)
    harness.run(*members)
    assert len({tuple(member.output_token_ids) for member in members}) > 1
    # The prompt once, its last token again for each child, and every output but the last token.
    assert harness.runner.num_computed == length + 3 + 4 * 5
    assert [m.num_cached_tokens for m in members] == [0, *[length - 1] * 3]


def test_the_partial_block_is_copied_and_full_ones_are_shared() -> None:
    harness = Harness(80, block_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    harness.add(*make_group("g", 10, 3, 6))
    assert rows(harness.step()) == {"g:0": 10}
    plan = harness.step()
    tables = {item.request_id: harness.runner.table(item) for item in plan.scheduled}
    assert tables["g:0"][:2] == tables["g:1"][:2] == tables["g:2"][:2]
    assert len({tables[f"g:{i}"][2] for i in range(3)}) == 3
    source = tables["g:0"][2]
    assert plan.block_copies == ((source, tables["g:1"][2]), (source, tables["g:2"][2]))


def test_others_pass_siblings_that_wait_for_the_prompt() -> None:
    harness = Harness(80, max_num_batched_tokens=16, max_num_seqs=4)
    harness.add(*make_group("g", 40, 2, 4), make_request("other", 3, 1))
    assert rows(harness.step()) == {"g:0": 13, "other:0": 3}
    assert harness.scheduler.num_waiting == 1


def test_a_long_prompt_ahead_in_the_lane_does_not_delay_forks() -> None:
    harness = Harness(400, max_num_batched_tokens=16, max_num_seqs=8)
    harness.add(*make_group("g", 40, 3, 30), make_request("long", 400, 1))
    while harness.requests["g:0"].num_output_tokens == 0:
        harness.step()
    plan = harness.step()
    assert {"g:1", "g:2", "long:0"} <= set(rows(plan))


@pytest.mark.parametrize("how", ["abort", "finish"])
@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_siblings_go_on_when_the_first_ends_early(how: str, when: int) -> None:
    harness = Harness(40, max_num_batched_tokens=8, max_num_seqs=2)
    members = make_group("g", 20, 4, 5)
    harness.add(*members)
    for _ in range(when):
        harness.step()
    if how == "abort":
        harness.scheduler.abort(["g:0"])
    else:
        harness.scheduler.finish("g:0", FinishReason.STOP, "x")
    harness.check()
    harness.drain()
    harness.check_drained()
    assert [m.num_output_tokens for m in members[1:]] == [5, 5, 5]


def test_parked_siblings_can_be_aborted() -> None:
    harness = Harness(40, max_num_batched_tokens=8, max_num_seqs=4)
    members = make_group("g", 20, 4, 5)
    harness.add(*members)
    harness.step()
    assert [m.status for m in members[1:]] == [RequestStatus.WAITING] * 3
    assert len(harness.scheduler.abort(["g:1", "g:3"])) == 2
    harness.drain()
    harness.check_drained()


def test_siblings_are_exact_under_pressure() -> None:
    harness = Harness(12, block_size=4, max_num_batched_tokens=8, max_num_seqs=6)
    groups = [make_group(f"g{i}", 7 + 3 * i, 3, 12, prompt_logprobs=0 if i == 1 else None) for i in range(3)]
    harness.run(*(member for group in groups for member in group))
    assert harness.stats().preemptions > 0


def test_only_choice_0_needs_prompt_logprobs() -> None:
    harness = Harness(60, max_num_batched_tokens=64)
    members = make_group("g", 18, 3, 4, prompt_logprobs=1)
    harness.run(*members)
    assert [m.num_cached_tokens for m in members] == [0, 17, 17]
    assert [len(harness.prompt_logprobs[m.request_id]) for m in members] == [17, 0, 0]


def test_a_resumed_sibling_keeps_its_own_output() -> None:
    harness = Harness(14, block_size=2, max_num_seqs=3, max_num_batched_tokens=12)
    members = make_group("g", 9, 3, 14)
    harness.run(*members)
    assert sum(m.num_preemptions for m in members) > 0
    assert [m.output_token_ids for m in members] == [solo_tokens(m, 97) for m in members]
