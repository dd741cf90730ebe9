"""Deterministic mode: the bits of a request's logits depend on nothing but the request.

Compared are the logits of every row of every step, also of the ends of chunks that sample nothing and of what is
computed again after a preemption, with those of the request alone: one token a step, in a shape of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.batch.bucket_plan import Shapes
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.model_runner import ModelRunner
from jaxserve.errors import ConfigError
from jaxserve.models.random_weights import init_random
from jaxserve.request import GenerationRequest
from tests.engine_harness import Outcomes, ServedModel, ask, run, serve
from tests.text_models import smollm2

VOCAB = 512  # small, so that all logits can be kept
# Of widths at which XLA sums a row in one way in small batches and in another in large ones.
MODEL = ModelConfig("LlamaForCausalLM", VOCAB, 64, 128, 2, 4, 2, 16, 2048)
# Contexts of several windows of attention, so that the online softmax has something to merge.
OPTIONS = EngineConfig(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=12,
    max_num_batched_tokens=64,
    block_size=16,
    deterministic=True,
    host_memory=2**21,
)
FINE = ((2, (2,)), (24, (12,)), (64, (12,)))
ROUGH = FINE[-1:]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, VOCAB, length).tolist()


SHARED = prompt(0, 90)
REQUESTS = [
    ask("plain", prompt(1, 31), 40),
    ask("one", prompt(2, 1), 30, logprobs=20),
    ask("long", prompt(3, 200), 14, logprobs=3),
    ask("seeded", prompt(4, 17), 30, temperature=0.9, seed=42, top_p=0.9, min_p=0.01, logprobs=0),
    ask("top_k", prompt(5, 120), 20, temperature=1.1, seed=2, top_k=40),
    ask("penalties", prompt(6, 23), 24, frequency_penalty=0.7, repetition_penalty=1.3, logprobs=2),
    ask("biased", prompt(7, 9), 16, logit_bias={5: 3.0, 7: -100.0}, min_tokens=4),
    ask("choices", [*SHARED, 77], 12, n=3, temperature=0.8, seed=9, logprobs=1),
    ask("shared", [*SHARED[:85], 300], 20),
    ask("scored", [*SHARED, 301, 302], 9, prompt_logprobs=2, logprobs=5),
]


@dataclass
class Logits:
    """Bits of the logits after a sequence's first tokens, by (sequence, how many tokens); equal whenever computed."""

    of: dict[tuple[str, int], bytes] = field(default_factory=dict)
    differing: set[tuple[str, int]] = field(default_factory=set)

    def add(self, batch: HostBatch, logits_SV: np.ndarray) -> None:
        for row, logits_V in zip(batch.rows, logits_SV, strict=False):
            key = (row.request_id, row.num_computed_tokens + row.num_scheduled_tokens)
            if self.of.setdefault(key, logits_V.tobytes()) != logits_V.tobytes():
                self.differing.add(key)


@dataclass(frozen=True)
class Watched:
    """A model in two sets of shapes, whose logits are watched, and what every request gives alone."""

    options: EngineConfig
    directory: Path
    rough: ServedModel
    fine: ServedModel
    seen: Logits
    alone: Outcomes

    def check(self, outcomes: Outcomes) -> None:
        assert not self.seen.differing, sorted(self.seen.differing)
        for key, outcome in outcomes.items():
            mine, theirs = (dataclasses.asdict(x) for x in (outcome, self.alone[key]))
            for fact in ("token_ids", "text", "logprobs", "prompt_logprobs", "finish_reason"):
                assert mine[fact] == theirs[fact], f"{key}: {fact}"


def build(options: EngineConfig, shapes: Shapes, seen: Logits, directory: Path | None = None) -> ServedModel:
    params = init_random(MODEL, jnp.dtype(options.dtype))
    for layer in params["layers"].values():
        layer["self_attn"]["o_proj"]["kernel"] *= 3  # attention must matter
    width = resolve(options, MODEL, platform="cpu").max_blocks_per_seq
    buckets = ShapeBuckets(shapes, width)
    return serve(options, MODEL, params, smollm2(), directory, buckets=buckets, observe_logits=seen.add)


@pytest.fixture(
    scope="module",
    params=["float32", "bfloat16"],
)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    options, seen = dataclasses.replace(OPTIONS, dtype=request.param), Logits()
    directory = tmp_path_factory.mktemp("programs")
    fine = build(options, FINE, seen, directory)
    rough = dataclasses.replace(fine, buckets=ShapeBuckets(ROUGH, fine.buckets.blocks))
    one_by_one = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_prefill_chunk": 1}
    alone: Outcomes = {}
    for asked in REQUESTS:
        alone |= run(rough.engine(enable_prefix_caching=False, **one_by_one), [asked])
    yield Watched(options, directory, rough, fine, seen, alone)
    fine.close()


def test_alone_every_position_was_seen(watched: Watched) -> None:
    """Otherwise comparing with what was seen would compare nothing."""
    for (request_id, index), outcome in watched.alone.items():
        request = next(request for request in REQUESTS if request.request_id == request_id)
        end = len(request.prompt_token_ids) + len(outcome.token_ids)
        assert all((f"{request_id}:{index}", count) in watched.seen.of for count in range(1, end))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted(watched: Watched, prefix_caching: bool) -> None:
    engine = watched.fine.engine(num_blocks=22, enable_prefix_caching=prefix_caching)
    watched.check(run(engine, REQUESTS))
    assert engine.stats.preemptions > 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_swapped(watched: Watched, prefix_caching: bool, overlap: bool) -> None:
    """Each comes with a higher priority than those before. By the clock a look takes a second: computing is dear."""
    arrivals = {6 * i: [dataclasses.replace(asked, priority=-i)] for i, asked in enumerate(REQUESTS)}
    options = {"num_blocks": 22, "num_host_blocks": 60, "clock": itertools.count().__next__}
    engine = watched.fine.engine(enable_prefix_caching=prefix_caching, overlap=overlap, **options)
    watched.check(run(engine, arrivals))
    assert engine.stats.swap.preemptions > 2
    assert engine.stats.swap.in_blocks > 10


def test_cached(watched: Watched) -> None:
    engine = watched.fine.engine()
    for _ in range(2):
        outcomes = run(engine, REQUESTS)
        watched.check(outcomes)
    assert outcomes["long", 0].num_cached_tokens == 192


@st.composite
def schedules(
    draw: st.DrawFn,
) -> tuple[str, dict[str, Any], dict[int, list[GenerationRequest]], dict[int, list[str]]]:
    """(which shapes, options of the engine, requests by arrival step, ids to abort by step)"""
    shapes = draw(st.sampled_from(["rough", "fine", "fine"]))
    options = {
        "num_blocks": draw(st.sampled_from([16, 20, 35, 192])),
        "max_prefill_chunk": draw(st.sampled_from([1, 5, 16, 33, 64])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 12])),
        "enable_prefix_caching": draw(st.booleans()),
        "num_host_blocks": draw(st.sampled_from([0, 3, 60])),
    }
    chosen = draw(st.lists(st.sampled_from(range(len(REQUESTS))), min_size=2, unique=True))
    arrivals: dict[int, list[GenerationRequest]] = {}
    aborts: dict[int, list[str]] = {}
    for index in chosen:
        step, priority = draw(st.integers(0, 30)), draw(st.sampled_from([0, 0, 1]))
        arrivals.setdefault(step, []).append(dataclasses.replace(REQUESTS[index], priority=priority))
        if draw(st.integers(0, 5)) == 0:
            aborts.setdefault(step + draw(st.integers(1, 30)), []).append(REQUESTS[index].request_id)
    return shapes, options, arrivals, aborts


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_random_schedules(watched: Watched, schedule) -> None:
    shapes, options, arrivals, aborts = schedule
    outcomes = run(getattr(watched, shapes).engine(**options), arrivals, aborts=aborts)
    left = {request_id for ids in aborts.values() for request_id in ids}
    watched.check({key: outcome for key, outcome in outcomes.items() if key[0] not in left})


def test_restarted_from_serialised_executables(watched: Watched) -> None:
    again = build(watched.options, FINE, watched.seen, watched.directory)
    assert again.runner.num_compiled == 0
    watched.check(run(again.engine(num_blocks=25, max_prefill_chunk=7), REQUESTS))
    again.close()


def test_one_bit_is_a_difference() -> None:
    """What all of these tests compare with. (Whether the default mode differs depends on the machine.)"""
    seen, row = Logits(), SimpleNamespace(request_id="a:0", num_computed_tokens=3, num_scheduled_tokens=1)
    batch: Any = SimpleNamespace(rows=[row])
    logits = np.ones((2, VOCAB), np.float32)  # the second row is padding
    seen.add(batch, logits)
    seen.add(batch, logits)
    assert not seen.differing
    logits[0, 7] = np.nextafter(logits[0, 7], np.float32(2))
    seen.add(batch, logits)
    assert seen.differing == {("a:0", 4)}


def test_shapes_of_one_row_are_refused() -> None:
    config = resolve(OPTIONS, MODEL, platform="cpu")
    for shapes in (((64, (1, 12)),), ((1, (1,)), (64, (12,)))):
        with pytest.raises(ConfigError, match="at least 2 tokens and 2 sequences"):
            ModelRunner(
                MODEL,
                config,
                {},
                attention=choose_attention(MODEL, config),
                num_blocks=1,
                buckets=ShapeBuckets(shapes, config.max_blocks_per_seq),
                cache_directory=None,
            )


@pytest.mark.parametrize("name", ["pallas-triton", "pallas-mosaic-gpu-interpret", "pallas-interpret"])
def test_backends_that_promise_nothing_are_refused(name: str) -> None:
    config = resolve(dataclasses.replace(OPTIONS, attention_backend=name), MODEL, platform="cpu")
    with pytest.raises(ConfigError, match="deterministic mode needs cpu-native or xla, on a cpu"):
        choose_attention(MODEL, config)
