"""The scheduler's decisions, one at a time: order, chunks, growth, preemption, priorities, ends."""

from __future__ import annotations

import pytest

from jaxserve.outputs import ModelRunnerOutput, TokenLogprobs
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduler.scheduler import Scheduler
from tests.fakes import make_group, make_request, solo_tokens
from tests.scheduler.harness import Harness, rows


def decode(harness: Harness, *requests: Request) -> None:
    """Add requests and step until all of them decode."""
    harness.add(*requests)
    for _ in range(1000):
        if all(r.status is RequestStatus.RUNNING and r.num_unplanned_tokens == 1 for r in requests):
            return
        harness.step()
    raise AssertionError("they never all decode")


# Order and budget.


def test_decodes_come_first_and_every_one_of_them() -> None:
    harness = Harness(100, max_num_batched_tokens=8)
    decode(harness, make_request("a", 4, 30), make_request("b", 4, 30))
    harness.add(make_request("c", 60, 2))
    plan = harness.step()
    assert list(rows(plan).items()) == [("a:0", 1), ("b:0", 1), ("c:0", 6)]


def test_a_request_alone_has_the_whole_budget() -> None:
    harness = Harness(100, max_num_batched_tokens=16, max_prefill_chunk=4)
    harness.add(make_request("a", 40, 2))
    assert [rows(harness.step())["a:0"] for _ in range(3)] == [16, 16, 8]


def test_short_prompts_join_while_a_long_one_is_computed() -> None:
    harness = Harness(100, max_num_seqs=8, max_num_batched_tokens=16, max_prefill_chunk=8)
    harness.add(make_request("long", 100, 2), *(make_request(f"s{i}", 4, 1) for i in range(4)))
    assert rows(harness.step()) == {"long:0": 8, "s0:0": 4, "s1:0": 4}
    assert rows(harness.step()) == {"long:0": 8, "s2:0": 4, "s3:0": 4}
    assert rows(harness.step()) == {"long:0": 16}


def test_one_long_prompt_at_a_time_in_order_of_arrival() -> None:
    harness = Harness(200, max_num_batched_tokens=16)
    names = ["x", "y", "z"]
    harness.add(*(make_request(name, 50, 1) for name in names))
    while harness.scheduler.has_unfinished:
        harness.step()
        partial = [
            r.request_id
            for r in harness.requests.values()
            if r.status is RequestStatus.RUNNING and 0 < r.num_computed_tokens < r.num_prompt_tokens
        ]
        assert len(partial) <= 1
    ended = [i for i, _ in sorted(harness.ends.items(), key=lambda pair: pair[0])]
    assert ended == ["x:0", "y:0", "z:0"]
    assert (
        harness.runner.num_steps == 10
    )  # 150 tokens, 16 a step: nothing was left unused between two of them


def test_a_long_prompt_waiting_its_turn_does_not_hold_up_short_ones() -> None:
    harness = Harness(500, max_num_seqs=8, max_num_batched_tokens=16)
    harness.add(make_request("long1", 200, 1), make_request("long2", 200, 1), make_request("short", 3, 1))
    assert rows(harness.step()) == {"long1:0": 13, "short:0": 3}
    assert harness.requests["short:0"].is_finished


def test_scheduling_alone_moves_no_counter() -> None:
    harness = Harness(100)
    harness.add(make_request("a", 10))
    request = harness.requests["a:0"]
    plan = harness.scheduler.schedule(0.0)
    assert request.num_computed_tokens == 0
    harness.scheduler.update_from_output(plan, harness.runner.run(plan))
    assert request.num_computed_tokens == 10


def test_a_plan_names_each_block_once() -> None:
    harness = Harness(100, block_size=4, max_num_batched_tokens=6)
    harness.add(make_request("a", 20, 8))
    lengths = [len(harness.step().scheduled[0].new_block_ids) for _ in range(11)]
    assert lengths == [6, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]


def test_the_same_requests_give_the_same_plans() -> None:
    def history() -> list[object]:
        harness = Harness(14, max_num_seqs=3, max_num_batched_tokens=8)
        harness.add(*(make_request(f"r{i}", 3 + 5 * i, 9, priority=i % 2) for i in range(7)))
        harness.add(*make_group("g", 10, 3, 5))
        plans: list[object] = []
        while harness.scheduler.has_unfinished:
            plan = harness.step()
            items = [
                (i.request_id, i.num_scheduled_tokens, i.new_block_ids, i.is_new) for i in plan.scheduled
            ]
            plans.append((items, plan.block_copies, [r.request_id for r in plan.preempted]))
        return plans

    assert history() == history()


# Growth and preemption.


def test_the_latest_of_equals_makes_room_and_comes_back_first() -> None:
    harness = Harness(8, block_size=4, max_num_batched_tokens=32, max_num_seqs=4)
    decode(harness, make_request("a", 10, 20), make_request("b", 10, 12))
    harness.add(make_request("later", 10, 2))
    preempted: list[Request] = []
    while not preempted:
        plan = harness.step()
        preempted = list(plan.preempted)
    assert [r.request_id for r in preempted] == ["b:0"]
    victim = preempted[0]
    assert victim.status is RequestStatus.WAITING
    assert (victim.num_computed_tokens, victim.slot, victim.num_preemptions) == (0, None, 1)
    assert victim.output_token_ids == solo_tokens(victim, 97)[: victim.num_output_tokens]
    while victim.status is RequestStatus.WAITING:
        assert harness.requests["later:0"].status is RequestStatus.WAITING
        harness.step()
    harness.drain()
    harness.check_drained()


def test_a_resumed_request_finds_its_own_blocks_and_reloads_its_row() -> None:
    harness = Harness(8, block_size=4, max_num_batched_tokens=32)
    decode(harness, make_request("a", 10, 14), make_request("b", 10, 12))
    seen_preempted = False
    while harness.scheduler.has_unfinished:
        plan = harness.step()
        seen_preempted = seen_preempted or bool(plan.preempted)
        for item in plan.scheduled:
            if item.request_id == "b:0" and item.is_new and seen_preempted:
                assert item.num_computed_tokens > 0
                assert item.num_scheduled_tokens < item.request.num_tokens
                harness.drain()
                harness.check_drained()
                return
    raise AssertionError("b was not resumed")


def test_the_first_in_order_is_never_preempted() -> None:
    harness = Harness(9, block_size=2, max_num_seqs=5, max_num_batched_tokens=12)
    requests = [make_request(f"r{i}", 4, 13) for i in range(5)]
    harness.run(*requests)
    assert requests[0].num_preemptions == 0
    assert harness.stats().preemptions > 0


def test_the_lowest_priority_is_preempted_before_the_latest() -> None:
    harness = Harness(6, block_size=4, max_num_batched_tokens=32)
    decode(harness, make_request("low", 10, 10, priority=5), make_request("high", 10, 10, priority=1))
    preempted: list[Request] = []
    while not preempted:
        preempted = list(harness.step().preempted)
    assert [r.request_id for r in preempted] == ["low:0"]


# Priorities.


@pytest.mark.parametrize("scarce", ["slots", "blocks"])
def test_a_higher_priority_displaces_strictly_lower_ones(scarce: str) -> None:
    harness = Harness(
        100 if scarce == "slots" else 11,
        max_num_seqs=2 if scarce == "slots" else 8,
        max_num_batched_tokens=64,
    )
    decode(harness, make_request("a", 16, 4, priority=1), make_request("b", 16, 4, priority=1))
    harness.add(make_request("equal", 9, 4, priority=1))
    assert not harness.step().preempted
    harness.add(make_request("urgent", 9, 4, priority=0))
    plan = harness.step()
    assert [r.request_id for r in plan.preempted] == ["b:0"]
    assert "urgent:0" in rows(plan)
    harness.drain()
    harness.check_drained()
    assert harness.requests["a:0"].num_preemptions == 0


def test_nobody_is_displaced_in_vain() -> None:
    """All lower ones together would not make enough room, so they keep running."""
    harness = Harness(12, max_num_seqs=4, max_num_batched_tokens=64)
    decode(harness, make_request("same", 24, 6, priority=0), make_request("low", 8, 6, priority=1))
    harness.add(make_request("big", 36, 2, priority=0))
    assert not harness.step().preempted
    harness.drain()
    harness.check_drained()
    assert harness.stats().preemptions == 0


def test_equals_never_displace_each_other() -> None:
    harness = Harness(100, max_num_seqs=2, max_num_batched_tokens=64)
    harness.run(*(make_request(f"r{i}", 6, 8) for i in range(10)))
    assert harness.stats().preemptions == 0


def test_a_long_prompt_of_higher_priority_takes_the_lane_over() -> None:
    harness = Harness(400, max_num_batched_tokens=16)
    harness.add(make_request("low", 200, 1, priority=1))
    harness.step()
    harness.add(make_request("high", 100, 1, priority=0))
    assert rows(harness.step()) == {"high:0": 16}
    harness.drain()
    harness.check_drained()


# Ends.


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason", "length"),
    [
        ({"stop": [42]}, FinishReason.STOP, 42, 3),
        ({"eos": [42]}, FinishReason.STOP, None, 3),
        ({"eos": [42], "stop": [42]}, FinishReason.STOP, 42, 3),
        ({"eos": [42], "min_tokens": 4}, FinishReason.LENGTH, None, 5),
        ({"eos": [42], "min_tokens": 3}, FinishReason.STOP, None, 3),
        ({}, FinishReason.LENGTH, None, 5),
    ],
)
def test_reasons_to_end(
    params: dict[str, object], reason: FinishReason, stop_reason: int | None, length: int
) -> None:
    harness = Harness(20)
    request = make_request("a", 6, 5, **params)  # type: ignore[arg-type]
    harness.add(request)
    for token in (7, 8, 42, 9, 10):
        plan = harness.scheduler.schedule(0.0)
        result = ModelRunnerOutput({"a:0": [token]}, {"a:0": [TokenLogprobs(token, -1.0, 1)]})
        (update,) = harness.scheduler.update_from_output(plan, result)
        assert update.new_token_ids == [token]
        if request.is_finished:
            break
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.num_output_tokens == length
    assert harness.scheduler._kv.pool.num_free == 20


def test_a_stop_token_on_the_last_allowed_token_is_a_stop() -> None:
    harness = Harness(20)
    request = make_request("a", 6, 1, eos=[42])
    harness.add(request)
    plan = harness.scheduler.schedule(0.0)
    harness.scheduler.update_from_output(plan, ModelRunnerOutput({"a:0": [42]}))
    assert request.finish_reason is FinishReason.STOP


def test_tokens_after_an_end_are_dropped_with_their_logprobs() -> None:
    """A step that verifies drafts may return several tokens at once."""
    harness = Harness(20, num_speculative_tokens=2)
    request = make_request("a", 6, 8, eos=[42], logprobs=0, speculative_tokens=2)
    harness.add(request)
    harness.step()
    request.output_token_ids[0] = 5
    harness.scheduler.take_drafts(harness.scheduler.plan_drafts(), [(7, 42)])
    plan = harness.scheduler.schedule(0.0)
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in (7, 42, 9)]
    (update,) = harness.scheduler.update_from_output(
        plan, ModelRunnerOutput({"a:0": [7, 42, 9]}, {"a:0": logprobs})
    )
    assert [5, *update.new_token_ids] == request.output_token_ids == [5, 7, 42]
    assert update.logprobs == logprobs[:2]


def test_drafts_behind_a_stop_string_are_not_accepted() -> None:
    """Who looks for stop strings finds one when the step's tokens have been counted."""
    harness = Harness(20, num_speculative_tokens=3)
    request = make_request("a", 6, 20, speculative_tokens=3)
    harness.add(request)
    harness.step()
    while not harness.stats().speculation.accepted_tokens:
        harness.step()
    (update,) = harness.last_updates
    accepted = harness.stats().speculation.accepted_tokens
    assert update.num_accepted_drafts == accepted > 1
    harness.scheduler.finish_within(update, 1, FinishReason.STOP, "x")
    counts = harness.stats().speculation
    assert counts.accepted_tokens == 1
    assert counts.accepted_by_position == [1, 0, 0]
    assert harness.stats().generation_tokens == request.num_output_tokens


def test_an_end_behind_a_stop_string_was_none() -> None:
    """The token that ended it for the scheduler stands behind a stop string, in the same draft."""
    harness = Harness(20, num_speculative_tokens=3)
    request = make_request("a", 6, 4, speculative_tokens=3)
    harness.add(request)
    harness.step()
    request.output_token_ids[0] = 5
    harness.scheduler.take_drafts(harness.scheduler.plan_drafts(), [(7, 8)])
    plan = harness.scheduler.schedule(0.0)
    (update,) = harness.scheduler.update_from_output(plan, ModelRunnerOutput({"a:0": [7, 8, 9]}))
    assert request.finish_reason is FinishReason.LENGTH
    harness.scheduler.finish_within(update, 1, FinishReason.STOP, "x")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "x")
    assert request.output_token_ids == [5, 7]
    stats = harness.stats()
    assert stats.generation_tokens == 2
    assert stats.speculation.accepted_by_position == [1, 0, 0]
    assert {reason: count for reason, count in stats.finished.items() if count} == {"stop": 1}


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_no_tokens_wanted_ends_after_the_prompt(kind: str) -> None:
    harness = Harness(20, scheduler=kind, max_num_batched_tokens=4)
    request = make_request("a", 10, 0, prompt_logprobs=1)
    harness.run(request)
    assert request.output_token_ids == []
    assert request.finish_reason is FinishReason.LENGTH
    assert len(harness.prompt_logprobs["a:0"]) == 9


def test_a_failed_row_ends_alone_and_poisons_no_cache() -> None:
    harness = Harness(40, max_num_batched_tokens=64)
    prompt = list(range(20))
    harness.add(make_request("bad", prompt, 5), make_request("good", 7, 5))
    harness.runner.failing = {"bad:0"}
    harness.step()
    bad = harness.requests["bad:0"]
    assert bad.finish_reason is FinishReason.ERROR
    assert harness.errors == {"bad:0": "logits are not finite"}
    harness.drain()
    harness.check_drained()
    again = make_request("again", prompt, 5)
    harness.run(again)
    assert again.num_cached_tokens == 0


def test_a_row_that_fails_late_takes_its_earlier_blocks_out_of_the_cache() -> None:
    harness = Harness(40, max_num_batched_tokens=8)
    prompt = list(range(20))
    harness.add(make_request("bad", prompt, 5))
    harness.step()
    assert harness.scheduler._kv.pool.num_cached == 2
    harness.runner.failing = {"bad:0"}
    harness.drain()
    assert harness.scheduler._kv.pool.num_cached == 0


def test_stop_string_and_abort_free_at_once_and_only_once() -> None:
    harness = Harness(20, max_num_seqs=1)
    decode(harness, make_request("a", 6, 9))
    harness.add(make_request("b", 6, 9))
    assert harness.scheduler._kv.pool.num_free < 20
    harness.scheduler.finish("a:0", FinishReason.STOP, "END")
    harness.scheduler.finish("a:0", FinishReason.STOP, "END")
    assert harness.scheduler.abort(["a:0", "b:0", "nobody"]) == [harness.requests["b:0"]]
    assert harness.scheduler._kv.pool.num_free == 20
    assert harness.stats().finished == {"stop": 1, "abort": 1}


def test_results_of_ended_and_replaced_requests_are_ignored() -> None:
    harness = Harness(20)
    harness.add(make_request("a", 6, 9))
    plan = harness.scheduler.schedule(0.0)
    result = harness.runner.run(plan)
    harness.scheduler.abort(["a:0"])
    successor = make_request("a", 6, 9)  # same id, same tokens
    harness.scheduler.add(successor)
    assert harness.scheduler.update_from_output(plan, result) == []
    assert successor.output_token_ids == []


def test_a_result_from_before_a_preemption_is_ignored() -> None:
    harness = Harness(20, max_num_seqs=1, enable_prefix_caching=False)
    harness.add(make_request("a", 6, 9, priority=1))
    old_plan = harness.scheduler.schedule(0.0)
    result = harness.runner.run(old_plan)
    harness.add(make_request("urgent", 3, 1, priority=0))
    plan = harness.scheduler.schedule(0.0)
    assert [r.request_id for r in plan.preempted] == ["a:0"]
    assert harness.scheduler.update_from_output(old_plan, result) == []
    harness.scheduler.update_from_output(plan, harness.runner.run(plan))
    plan = harness.scheduler.schedule(0.0)  # a runs again, from the same counter as in the old plan
    assert rows(plan) == {"a:0": 6}
    assert harness.scheduler.update_from_output(old_plan, result) == []
    harness.scheduler.update_from_output(plan, harness.runner.run(plan))
    assert harness.requests["a:0"].num_output_tokens == 1


def test_a_result_that_does_not_belong_to_its_plan_is_an_error() -> None:
    harness = Harness(20, max_num_batched_tokens=4)
    harness.add(make_request("a", 8, 9))
    plan = harness.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="none was due"):
        harness.scheduler.update_from_output(plan, ModelRunnerOutput({"a:0": [1]}))
    result = harness.runner.run(plan)
    harness.scheduler.update_from_output(plan, result)
    with pytest.raises(RuntimeError, match="accepted before"):
        harness.scheduler.update_from_output(plan, result)
    plan = harness.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="1 to 1 were due"):
        harness.scheduler.update_from_output(plan, ModelRunnerOutput())


def test_gauges_and_counters() -> None:
    harness = Harness(20, max_num_seqs=1)
    harness.add(make_request("a", 6, 3), make_request("b", 7, 2))
    harness.step()
    stats = harness.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (1, 1, 20)
    assert stats.num_free_blocks == 18
    harness.drain()
    stats = harness.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 20)
    assert (stats.prompt_tokens, stats.generation_tokens) == (13, 5)
    assert stats.finished == {"length": 2}


def change_the_prompt(scheduler: Scheduler, request: Request) -> None:
    request.prompt_token_ids = (999,) * request.num_prompt_tokens
    scheduler._kv._chains.clear()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda s, r: s._kv._tables[r.request_id].block_ids.append(s._kv._tables[r.request_id].block_ids[0]),
        lambda s, r: s._kv._tables[r.request_id].block_ids.pop(),
        lambda s, r: setattr(r, "slot", 1),
        lambda s, r: setattr(r, "slot", None),
        lambda s, r: setattr(r, "num_computed_tokens", r.num_tokens),
        lambda s, r: setattr(r, "num_computed_tokens", 0),
        lambda s, r: setattr(r, "status", RequestStatus.WAITING),
        lambda s, r: s._kv.pool.touch([s._kv._tables[r.request_id].block_ids[0]]),
        lambda s, r: s._running.reverse(),
        change_the_prompt,
    ],
)
def test_the_integrity_check_sees_corruption(corrupt) -> None:  # type: ignore[no-untyped-def]
    harness = Harness(20)
    decode(harness, make_request("a", 10, 20), make_request("b", 10, 20))
    harness.check()
    corrupt(harness.scheduler, harness.requests["a:0"])
    with pytest.raises(AssertionError):
        harness.scheduler.check_integrity()
