"""Drafts from a model on the device: the same tokens as without, and a draft's cache that stays in step.

A draft model that is the target once more shows the latter: as long as its cache holds what the target's does, it says
what the target says, and all that it says is accepted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.device.attention import choose_attention
from jaxserve.device.draft_model import DraftModel, first_layers
from jaxserve.engine import EngineCore
from jaxserve.models.random_weights import init_random
from jaxserve.request import FinishReason, GenerationRequest
from tests.engine_harness import (
    TINY_MODEL,
    TINY_OPTIONS,
    ServedModel,
    ask,
    assert_as_solo,
    mixed_requests,
    prompt_ids,
    run,
    serve,
)
from tests.exactness.test_step_failures import FlakyRunner
from tests.exits import exit_shape, random_exit
from tests.text_models import smollm2

MOST = 4
SMALL_POOL = 26
BUCKETS = ShapeBuckets(((8, (8,)), (32, (16,))), 32)


def weights() -> dict[Any, Any]:
    params = init_random(TINY_MODEL, jnp.float32)
    for layer in params["layers"].values():
        # Attention outweighs the token itself, so that every position of the context matters.
        layer["self_attn"]["o_proj"]["kernel"] *= 3
    return params


@pytest.fixture(scope="module")
def twin(compile_cache_dir: Path) -> Iterator[ServedModel]:
    """Its draft model is the target once more, with a cache of its own."""
    draft = DraftModel(TINY_MODEL, is_own=True, attention=attention(), max_tokens=MOST)
    model = serve(
        TINY_OPTIONS,
        TINY_MODEL,
        weights(),
        smollm2(),
        compile_cache_dir,
        buckets=BUCKETS,
        draft=draft,
        draft_params=weights(),
    )
    yield model
    model.close()


@pytest.fixture(scope="module")
def own_layers(compile_cache_dir: Path) -> Iterator[ServedModel]:
    """Drafts with its first layer, and computes the same bits in any company."""
    options = dataclasses.replace(TINY_OPTIONS, deterministic=True)
    draft = first_layers(TINY_MODEL, 1, attention(deterministic=True), MOST)
    model = serve(options, TINY_MODEL, weights(), smollm2(), compile_cache_dir, buckets=BUCKETS, draft=draft)
    yield model
    model.close()


@pytest.fixture(scope="module")
def with_exit(compile_cache_dir: Path) -> Iterator[ServedModel]:
    """Drafts with its first layer and an exit of random weights, which knows a twelfth of the tokens."""
    shape = exit_shape(TINY_MODEL, num_tokens=4096)
    model = serve(
        TINY_OPTIONS,
        TINY_MODEL,
        weights(),
        smollm2(),
        compile_cache_dir,
        buckets=BUCKETS,
        draft=first_layers(TINY_MODEL, 1, attention(), MOST, shape),
        draft_params=random_exit(shape, TINY_MODEL.vocab_size),
    )
    yield model
    model.close()


def attention(**changes: Any) -> Any:
    from jaxserve.config import resolve

    options = dataclasses.replace(TINY_OPTIONS, **changes)
    return choose_attention(TINY_MODEL, resolve(options, TINY_MODEL, platform="cpu"))


def speculating(requests: Sequence[GenerationRequest], num_tokens: int) -> list[GenerationRequest]:
    return [
        dataclasses.replace(r, params=dataclasses.replace(r.params, speculative_tokens=num_tokens))
        for r in requests
    ]


def engine_of(model: ServedModel, **options: Any) -> EngineCore:
    return model.engine(drafts=True, num_speculative_tokens=MOST, **options)


def plain_requests(prefix: str = "") -> list[GenerationRequest]:
    """What the target's draft can foresee to the last token: no penalties, no end but the last token."""
    shared = prompt_ids("shared", 45)
    return [
        ask(f"{prefix}greedy", 31, 40),
        ask(f"{prefix}long", 100, 30, logprobs=2),
        ask(f"{prefix}seeded", 17, 32, seed=42, temperature=0.9),
        ask(f"{prefix}filters", 9, 24, seed=2**63, min_p=0.02, top_k=40, top_p=0.95, temperature=0.9),
        ask(f"{prefix}n3", shared[:40], 22, n=3, seed=10, temperature=1.2),
        ask(f"{prefix}one", [*shared, 5000], 22),
        ask(f"{prefix}two", [*shared, 6000, 6001], 19, prompt_logprobs=2),
        ask(f"{prefix}bias", 16, 20, logit_bias={500: 8.0, 700: -100.0}),
    ]


def assert_all_accepted(engine: EngineCore, at_least: int = 100) -> None:
    """But for near-ties, which a batch of another shape may decide otherwise."""
    counts = engine.stats.speculation
    assert counts.draft_tokens >= at_least
    assert counts.accepted_tokens >= 0.98 * counts.draft_tokens, counts


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({}, False),
        ({"num_blocks": SMALL_POOL}, True),
        ({"num_blocks": SMALL_POOL, "num_host_blocks": 100, "enable_prefix_caching": False}, True),
        ({"max_num_seqs": 3, "num_blocks": 20, "num_host_blocks": 30}, False),
    ],
    ids=["room", "preempted", "swapped", "crowded"],
)
def test_a_draft_models_cache_stays_in_step(
    twin: ServedModel, options: dict[str, Any], overlap: bool
) -> None:
    """Chunks, prefix hits, forks with their copied blocks, preemptions, blocks that come back from host memory."""
    clock = {"clock": itertools.count().__next__} if "num_host_blocks" in options else {}
    engine = engine_of(twin, overlap=overlap, **options, **clock)
    requests = speculating(plain_requests(), MOST)
    assert_as_solo(twin, requests, run(engine, requests))
    again = speculating(plain_requests("again-"), MOST)
    outcomes = run(engine, again)
    assert_as_solo(twin, again, outcomes)
    if "num_blocks" in options:
        assert engine.stats.preemptions > 0
    if "num_host_blocks" in options:
        assert engine.stats.swap.in_blocks > 0
    assert_all_accepted(engine)


@pytest.mark.parametrize(
    ("which", "overlap"), [("twin", False), ("own_layers", True), ("with_exit", False), ("with_exit", True)]
)
def test_every_kind_of_request(which: str, overlap: bool, request: pytest.FixtureRequest) -> None:
    """Penalties, stops, min_tokens, logprobs, with a pool that must preempt."""
    model: ServedModel = request.getfixturevalue(which)
    requests = speculating(mixed_requests(model), MOST)
    if which == "twin":  # drafts know of no grammar, so even a twin's part from what may follow
        requests = [request for request in requests if request.params.grammar is None]
    engine = engine_of(model, overlap=overlap, num_blocks=50)
    outcomes = run(engine, requests)
    assert_as_solo(model, requests, outcomes)
    counts = engine.stats.speculation
    assert counts.draft_tokens > 100
    # A model of random weights and its first layer never agree, nor do they with an exit of random weights.
    assert counts.accepted_tokens >= (0.7 * counts.draft_tokens if which == "twin" else 0)


def test_bit_for_bit(own_layers: ServedModel) -> None:
    """In deterministic mode logprobs have the same bits as alone and without drafts."""
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=3)) for r in plain_requests()
    ]
    engine = engine_of(own_layers, num_blocks=50)
    outcomes = run(engine, speculating(requests, MOST))
    for each in requests:
        for index, alone in own_layers.solo(each).items():
            together = outcomes[each.request_id, index]
            assert together.token_ids == alone.token_ids
            assert together.logprobs == alone.logprobs
    assert engine.stats.speculation.draft_tokens > 100


def test_aborts(twin: ServedModel) -> None:
    """In the middle of drafting; whoever gets their blocks has drafts of its own."""
    requests = [*plain_requests(), *plain_requests("late-")]
    aborts = {step: [request.request_id] for step, request in zip(range(4, 40, 5), requests, strict=False)}
    engine = engine_of(twin, num_blocks=60)
    requests = speculating(requests, MOST)
    outcomes = run(engine, {0: requests[:8], 20: requests[8:]}, aborts=aborts)
    assert_as_solo(twin, requests, outcomes)
    assert FinishReason.ABORT in {outcome.finish_reason for outcome in outcomes.values()}
    assert_all_accepted(engine, 50)


class FlakyDrafts(FlakyRunner):
    """Fails at drafts, after the device has been given them."""

    def __init__(self, model: ServedModel, drafts: Sequence[int]) -> None:
        super().__init__(model, launches=(5,))
        self._drafts = set(drafts)
        self._num_drafts = 0

    def can_draft(self, bucket: Bucket) -> bool:
        return self._runner.can_draft(bucket)

    def draft(self, batch: HostBatch, lengths: Sequence[int]) -> np.ndarray:
        drafts: np.ndarray = self._runner.draft(batch, lengths)
        self._num_drafts += 1
        if self._num_drafts - 1 in self._drafts:
            jax.tree.map(lambda x: x.delete(), self._runner._state.kv_cache)
            raise RuntimeError("the device is on fire")
        return drafts


def test_a_failure_while_drafting_costs_time_and_nothing_else(twin: ServedModel) -> None:
    runner = FlakyDrafts(twin, (0, 3, 4, 9))
    engine = engine_of(twin, runner=runner, num_blocks=60)
    requests = speculating(plain_requests(), MOST)
    assert_as_solo(twin, requests, run(engine, requests))
    assert engine.stats.step_failures == runner.num_rebuilt == 5
    assert_all_accepted(engine)
