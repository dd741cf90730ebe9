"""A request's tokens are those of its solo run, however it is batched, cached, chunked, preempted, or joined."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.request import FinishReason
from tests.engine_harness import (
    ServedModel,
    ask,
    assert_as_solo,
    assert_same,
    first_difference,
    mixed_requests,
    prompt_ids,
    run,
)

SMALL_POOL = 24  # blocks of 8: the longest of the mixed requests takes 16


@pytest.fixture(scope="module")
def mixed(tiny_model: ServedModel):
    return mixed_requests(tiny_model)


def test_an_output_depends_on_every_token_before_it(tiny_model):
    """Otherwise none of the comparisons here would notice a wrong cache entry."""
    prompt = list(prompt_ids("sensitive", 60))
    plain = tiny_model.solo(ask("a", prompt, 24))[0].token_ids
    for position in (0, 7, 8, 33, 59):
        changed = [*prompt[:position], prompt[position] + 1, *prompt[position + 1 :]]
        other = tiny_model.solo(ask("b", changed, 24))[0].token_ids
        assert first_difference(plain, other) is not None, f"position {position} does not matter"


def test_together(tiny_model, mixed):
    engine = tiny_model.engine()
    assert_as_solo(tiny_model, mixed, run(engine, mixed))
    assert engine.stats.preemptions == 0


def test_in_any_order_and_with_few_slots(tiny_model, mixed):
    for seed, slots in ((1, 16), (2, 5), (3, 1)):
        shuffled = random.Random(seed).sample(mixed, len(mixed))
        assert_as_solo(tiny_model, mixed, run(tiny_model.engine(max_num_seqs=slots), shuffled))


def test_with_a_warm_prefix_cache(tiny_model, mixed):
    engine = tiny_model.engine()
    run(engine, mixed)
    warm = run(engine, mixed)
    assert_as_solo(tiny_model, mixed, warm)
    cached = [outcome.num_cached_tokens for outcome in warm.values()]
    assert sum(cached) > 400
    assert warm["long", 0].num_cached_tokens == 96


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted(tiny_model, mixed, prefix_caching):
    """B113, B114: with seeds, penalties, stop strings, n, logprobs and prompt logprobs."""
    engine = tiny_model.engine(num_blocks=SMALL_POOL, enable_prefix_caching=prefix_caching)
    outcomes = run(engine, mixed)
    assert engine.stats.preemptions > 5
    assert_as_solo(tiny_model, mixed, outcomes)
    (solo,) = tiny_model.solo(mixed[-1]).values()
    scored, expected = outcomes["scored", 0].prompt_logprobs, solo.prompt_logprobs
    assert scored is not None
    assert expected is not None
    for mine, theirs in zip(scored[1:], expected[1:], strict=True):
        assert mine.token_id == theirs.token_id
        assert abs(mine.logprob - theirs.logprob) < 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 8, 31])
def test_in_chunks_of_any_size(tiny_model, mixed, chunk):
    assert_as_solo(tiny_model, mixed, run(tiny_model.engine(max_prefill_chunk=chunk), mixed))


def test_with_the_tightest_token_budget(tiny_model, mixed):
    engine = tiny_model.engine(max_num_seqs=4, max_num_batched_tokens=4, max_prefill_chunk=2)
    assert_as_solo(tiny_model, mixed, run(engine, mixed))


def test_in_static_batches(tiny_model, mixed):
    engine = tiny_model.engine(scheduler="static")
    assert_as_solo(tiny_model, mixed, run(engine, mixed))


def test_streamed_is_unstreamed(tiny_model, mixed):
    streamed = run(tiny_model.engine(), mixed)
    whole = run(tiny_model.engine(), [dataclasses.replace(request, stream=False) for request in mixed])
    for key, outcome in whole.items():
        assert outcome.num_outputs == 1
        assert_same(streamed[key], outcome, str(key)) if outcome.logprobs else None
        assert streamed[key].token_ids == outcome.token_ids
        assert streamed[key].text == outcome.text
        assert streamed[key].finish_reason == outcome.finish_reason


def test_mates_that_are_aborted_change_nothing(tiny_model, mixed):
    """At every step another one leaves: queued, in its prompt, decoding, or preempted."""
    doomed = mixed_requests(tiny_model, prefix="doomed-")
    together = [request for pair in zip(mixed, doomed, strict=True) for request in pair]
    leaving = random.Random(5).sample(doomed, len(doomed))
    aborts = {2 * step + 1: [request.request_id] for step, request in enumerate(leaving)}
    engine = tiny_model.engine(num_blocks=60, max_prefill_chunk=16)
    outcomes = run(engine, together, aborts=aborts)
    assert_as_solo(tiny_model, together, outcomes)
    ended = [outcomes[request.request_id, 0].finish_reason for request in doomed]
    assert ended.count(FinishReason.ABORT) > 9


def test_arriving_one_a_step(tiny_model, mixed):
    """B228: whoever joins shifts nobody's positions."""
    assert_as_solo(tiny_model, mixed, run(tiny_model.engine(), {i: [r] for i, r in enumerate(mixed)}))


@pytest.mark.parametrize("length", [1, 7, 63, 64, 65])
def test_joining_a_running_request_at_any_step(tiny_model, length):
    """B228."""
    first = ask("first", 20, 30)
    joining = {step: [ask(f"join{step}", length, 6)] for step in range(1, 21)}
    outcomes = run(tiny_model.engine(), {0: [first]} | joining)
    assert_as_solo(tiny_model, [first, *(request for (request,) in joining.values())], outcomes)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_full_pool_of_unique_prompts(tiny_model, prefix_caching):
    """B124, B103: blocks change hands all the time."""
    requests = [ask(f"unique{i}", 10 + i % 23, 25) for i in range(40)]
    engine = tiny_model.engine(num_blocks=30, enable_prefix_caching=prefix_caching)
    assert_as_solo(tiny_model, requests, run(engine, requests))
    assert engine.stats.preemptions > 0
    assert prefix_caching == (engine.stats.evictions > 0)


def test_many_outputs_outgrow_the_pool(tiny_model):
    """B113: n = 2 and logprobs under pressure; every token is delivered once."""
    requests = [ask(f"grow{i}", 30, 70, n=2, seed=i, temperature=0.8, logprobs=1) for i in range(8)]
    engine = tiny_model.engine(num_blocks=40)
    outcomes = run(engine, requests)
    assert engine.stats.preemptions > 5
    assert_as_solo(tiny_model, requests, outcomes)
    for outcome in outcomes.values():
        assert len(outcome.token_ids) == len(outcome.logprobs) == 70


@st.composite
def schedules(draw: st.DrawFn, num_requests: int):
    """(options of the engine, request indices by arrival step, priorities, ids to abort by step)"""
    options = {
        "num_blocks": draw(st.sampled_from([17, 20, 28, 512])),
        "max_prefill_chunk": draw(st.sampled_from([1, 5, 16, 32])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16])),
        "enable_prefix_caching": draw(st.booleans()),
        "overlap": draw(st.booleans()),
    }
    chosen = draw(st.lists(st.integers(0, num_requests - 1), min_size=2, max_size=12, unique=True))
    arrivals = {index: draw(st.integers(0, 30)) for index in chosen}
    priorities = {index: draw(st.sampled_from([0, 0, 1])) for index in chosen}
    aborted = draw(st.lists(st.sampled_from(chosen), max_size=3, unique=True))
    aborts = {index: arrivals[index] + draw(st.integers(1, 40)) for index in aborted}
    return options, arrivals, priorities, aborts


@settings(max_examples=16, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_schedules(tiny_model, mixed, data):
    options, arrivals, priorities, aborts = data.draw(schedules(len(mixed)))
    requests = {i: dataclasses.replace(mixed[i], priority=priorities[i]) for i in arrivals}
    by_step: dict[int, list] = {}
    for index, step in arrivals.items():
        by_step.setdefault(step, []).append(requests[index])
    leave: dict[int, list[str]] = {}
    for index, step in aborts.items():
        leave.setdefault(step, []).append(mixed[index].request_id)
    outcomes = run(tiny_model.engine(**options), by_step, aborts=leave)
    assert_as_solo(tiny_model, requests.values(), outcomes)
