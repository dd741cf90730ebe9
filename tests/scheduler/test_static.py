"""The static baseline: padded prompts, and rows that stay until the last member has ended."""

from __future__ import annotations

import pytest

from tests.fakes import make_group, make_request
from tests.scheduler.harness import Harness, rows


def static(num_blocks: int, **config: object) -> Harness:
    return Harness(num_blocks, scheduler="static", **config)


@pytest.mark.parametrize("budget", [3, 4, 7, 16, 1000])
def test_a_batch_costs_its_longest_prompt_and_its_longest_output(budget: int) -> None:
    harness = static(100, max_num_seqs=3, max_num_batched_tokens=budget)
    harness.add(make_request("a", 4, 2), make_request("b", 11, 7), make_request("c", 6, 5))
    computed = 0
    while harness.scheduler.has_unfinished:
        plan = harness.step()
        assert plan.num_scheduled_tokens + plan.num_padding_tokens <= max(budget, 3)
        computed += plan.num_scheduled_tokens + plan.num_padding_tokens
    harness.check_drained()
    assert computed == 3 * 11 + 3 * (7 - 1)


def test_nobody_joins_a_running_batch() -> None:
    harness = static(100, max_num_seqs=4, max_num_batched_tokens=100)
    harness.add(make_request("a", 4, 6), make_request("b", 4, 2))
    harness.step()
    harness.add(make_request("late", 4, 1))
    for _ in range(5):
        assert "late:0" not in rows(harness.step())
    assert rows(harness.step()) == {"late:0": 4}


def test_ended_rows_are_computed_as_padding() -> None:
    harness = static(100, max_num_seqs=3, max_num_batched_tokens=100)
    harness.add(make_request("a", 4, 1), make_request("b", 4, 2), make_request("c", 4, 4))
    paddings = []
    while harness.scheduler.has_unfinished:
        paddings.append(harness.step().num_padding_tokens)
    assert paddings == [0, 1, 2, 2]


def test_all_members_sample_their_first_token_in_the_same_step() -> None:
    harness = static(100, max_num_seqs=3, max_num_batched_tokens=9)
    harness.add(make_request("a", 1, 3), make_request("b", 20, 3), make_request("c", 8, 3))
    while not any(harness.tokens.values()):
        harness.step()
    assert [len(tokens) for tokens in harness.tokens.values()] == [1, 1, 1]


def test_the_batch_is_as_large_as_its_longest_outputs_fit() -> None:
    harness = static(10, block_size=4, max_num_seqs=4, max_num_batched_tokens=100)
    harness.add(*(make_request(f"r{i}", 8, 9) for i in range(4)))
    assert len(harness.step().scheduled) == 2  # 16 computed tokens at most: 4 blocks each
    harness.drain()
    harness.check_drained()


@pytest.mark.parametrize("when", range(8))
def test_aborting_the_longest_prompt_stalls_nobody(when: int) -> None:
    harness = static(100, max_num_seqs=3, max_num_batched_tokens=9)
    harness.add(make_request("a", 2, 3), make_request("long", 20, 3), make_request("c", 8, 3))
    for _ in range(when):
        harness.step()
    harness.scheduler.abort(["long:0"])
    harness.check()
    harness.drain()
    harness.check_drained()


def test_groups_and_waves_are_exact() -> None:
    harness = static(40, max_num_seqs=4, max_num_batched_tokens=16)
    harness.run(
        *(make_request(f"r{i}", 3 + i, 1 + i % 5, priority=i % 2) for i in range(9)), *make_group("g", 7, 3)
    )
