"""Blocks that went to host memory and came back: the same tokens, and nothing is left of anybody.

`test_deterministic.py` compares the bits of logits; here is every kind of request, and what ends meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from jaxserve.request import FinishReason
from tests.engine_harness import ask, assert_as_solo, mixed_requests, prompt_ids, run

SMALL_POOL = 40


@pytest.fixture(scope="module")
def mixed(tiny_model):
    return mixed_requests(tiny_model)


def engine_of(model, **options):
    """By its clock every look takes a second, so computing is dear and everything is swapped."""
    return model.engine(clock=itertools.count().__next__, **options)


def assert_tier_at_rest(engine) -> None:
    engine.check_integrity()
    assert engine.stats.swap.pinned_blocks == 0
    if not engine.config.enable_prefix_caching:
        assert engine.stats.swap.used_blocks == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"num_host_blocks": 9}, {"max_num_seqs": 3, "num_blocks": 20}],
)
def test_every_kind_of_request_is_as_alone(tiny_model, mixed, options, overlap) -> None:
    """Seeds, penalties, stop strings, n, logprobs, prompt logprobs; with ample host memory, and with too little."""
    options = {"num_blocks": SMALL_POOL, "num_host_blocks": 100} | options
    engine = engine_of(tiny_model, overlap=overlap, **options)
    assert_as_solo(tiny_model, mixed, run(engine, mixed))
    swap = engine.stats.swap
    assert swap.in_blocks >= 4, "hardly anything came back"
    assert swap.preemptions > 0
    assert_tier_at_rest(engine)


def test_swapped_or_computed_again_it_is_the_same(tiny_model) -> None:
    """Long ones that push each other out in turn: less is computed where blocks come back."""
    requests = [ask(f"long{i}", 60, 90, priority=i % 2) for i in range(6)]
    computed = {}
    for num_host_blocks in (0, 200):
        engine = engine_of(tiny_model, num_blocks=45, num_host_blocks=num_host_blocks)
        assert_as_solo(tiny_model, requests, run(engine, requests))
        computed[num_host_blocks] = engine.stats.useful_tokens
        assert engine.stats.preemptions > 3
    needed = sum(len(r.prompt_token_ids) + r.params.max_tokens - 1 for r in requests)
    assert computed[0] > 1.1 * needed
    # What is left is the partly filled block of each preemption.
    assert needed <= computed[200] <= needed + 8 * engine.stats.preemptions


def test_evicted_prefixes_come_back_from_host_memory(tiny_model) -> None:
    """A conversation that others have pushed out of the device's cache; under another salt nothing is found."""
    engine = engine_of(tiny_model, num_blocks=32, num_host_blocks=150)
    talk = prompt_ids("talk", 100)
    run(engine, [ask("first", talk, 10)])
    run(engine, [ask("other", 200, 4)])
    again = ask("again", [*talk, 7, 8], 10)
    outcomes = run(engine, [again])
    assert outcomes["again", 0].num_cached_tokens == 96
    assert engine.stats.swap.hits >= 40, "the rest was still on the device"
    assert_as_solo(tiny_model, [again], outcomes)
    run(engine, [ask("other2", 210, 4)])
    salted = dataclasses.replace(ask("salted", talk, 10), cache_salt="tenant")
    outcomes = run(engine, [salted])
    assert outcomes["salted", 0].num_cached_tokens == 0
    assert_as_solo(tiny_model, [salted], outcomes)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_abort_storms(tiny_model, mixed, overlap, prefix_caching) -> None:
    """Half of all are aborted at random steps, running, swapped out or waiting; twice on the same engine."""
    rng = random.Random(5)
    engine = engine_of(
        tiny_model,
        num_blocks=SMALL_POOL,
        num_host_blocks=30,
        overlap=overlap,
        enable_prefix_caching=prefix_caching,
    )
    for storm in range(2):
        requests = mixed_requests(tiny_model, f"{storm}-")
        aborts: dict[int, list[str]] = {}
        for request in rng.sample(requests, len(requests) // 2):
            aborts.setdefault(rng.randint(1, 60), []).append(request.request_id)
        outcomes = run(engine, requests, aborts=aborts)
        assert any(outcome.finish_reason is FinishReason.ABORT for outcome in outcomes.values())
        assert_as_solo(tiny_model, requests, outcomes)
        assert_tier_at_rest(engine)
    assert engine.stats.swap.preemptions > 0
