"""What the compiled step is (its optimised program), and what it computes (against a forward pass without a cache)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.bucket import Bucket
from jaxserve.device.model_runner import ModelRunner
from jaxserve.device.programs import ProgramMaker
from jaxserve.device.step import num_scored
from jaxserve.device.step_parts import StepParts
from jaxserve.models.random_weights import init_random
from jaxserve.outputs import TokenLogprobs
from jaxserve.request import Request
from scripts.aot import hlo
from tests.device.driver import BUCKETS, CONFIG, MODEL, NUM_BLOCKS, Driver
from tests.fakes import make_request
from tests.models.model_harness import sequence_logits

POOL_SHAPE = (NUM_BLOCKS + 1, MODEL.num_kv_heads, CONFIG.block_size, MODEL.head_dim)
POOL_BYTES = math.prod(POOL_SHAPE) * 4
every_bucket = pytest.mark.parametrize("bucket", BUCKETS.all_buckets(), ids=str)


@pytest.fixture(scope="module")
def parts_of(tiny_runner: ModelRunner) -> Callable[[Bucket], StepParts]:
    """A bucket's programs in the engine: on a CPU a program a part."""
    return lambda bucket: tiny_runner._executables[bucket].args[0]


@pytest.fixture(scope="module")
def whole_of(tiny_runner: ModelRunner) -> Callable[[Bucket], Any]:
    """A bucket's step as one program, as it is on accelerators."""
    return cache(ProgramMaker(dataclasses.replace(tiny_runner._maker.programs, by_layer=False), None))


@every_bucket
def test_state_is_updated_in_place(
    tiny_runner: ModelRunner,
    parts_of: Callable[[Bucket], StepParts],
    whole_of: Callable[[Bucket], Any],
    bucket: Bucket,
) -> None:
    leaves = lambda tree: len(jax.tree.leaves(tree))  # noqa: E731
    params, state = tiny_runner._params, tiny_runner._state
    assert leaves(state) == 2 * MODEL.num_layers + 3
    program = whole_of(bucket)
    num_params = leaves(params)
    assert hlo.aliased_outputs(program.as_text()) == {i: num_params + i for i in range(leaves(state))}
    assert program.memory_analysis().temp_size_in_bytes < POOL_BYTES
    parts = parts_of(bucket)
    assert len(set(map(id, parts.layers))) == 1, "equal layers share a program"
    keys, values, hidden = (leaves(params.layers[0]) + i for i in range(3))
    assert hlo.aliased_outputs(parts.layers[0].as_text()) == {0: keys, 1: values, 2: hidden}
    aliased = hlo.aliased_outputs(parts.sample.as_text())
    assert [aliased[i] - aliased[0] for i in range(leaves(state.sampling) + 1)] == [0, 1, 2]
    for part in (parts.begin, parts.layers[0], parts.select, parts.sample, parts.score):
        assert part.memory_analysis().temp_size_in_bytes < POOL_BYTES


@every_bucket
def test_no_array_of_the_pools_size_is_copied(
    parts_of: Callable[[Bucket], StepParts], whole_of: Callable[[Bucket], Any], bucket: Bucket
) -> None:
    for program, most in ((whole_of(bucket), 2 * MODEL.num_layers), (parts_of(bucket).layers[0], 2)):
        _, computations = hlo.parse(program.as_text())
        writes = 0
        for computation in computations.values():
            for instruction in computation.instructions:
                if instruction.shape is None or math.prod(instruction.shape) < math.prod(POOL_SHAPE):
                    continue
                if instruction.opcode == "fusion":
                    root = computations[instruction.called[0]].root.opcode
                    assert root in ("scatter", "dynamic-update-slice"), instruction.text
                    writes += 1
                else:
                    allowed = ("parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice")
                    assert instruction.opcode in allowed, instruction.text
        assert writes <= most


@every_bucket
def test_scoring_a_prompt_costs_nothing_unless_asked_for(
    parts_of: Callable[[Bucket], StepParts], whole_of: Callable[[Bucket], Any], bucket: Bucket
) -> None:
    """XLA once hoisted the vocabulary-wide product out of the loop that was not entered."""
    parts = parts_of(bucket)
    for scoring, sampling in ((whole_of(bucket), whole_of(bucket)), (parts.score, parts.sample)):
        scored, unconditional = products(scoring, 32)
        assert scored, "the scoring is nowhere: this test looks for the wrong shape"
        assert not scored & unconditional
        sampled, unconditional = products(sampling, bucket.seqs)
        assert sampled & unconditional, "each row's own logits are always computed"
        if bucket.tokens > 32:
            assert not products(scoring, bucket.tokens)[0], "logits of all tokens at once"


def products(program: Any, rows: int) -> tuple[set[str], set[str]]:
    """Computations of a program that hold logits of `rows` rows, and those that always run."""
    entry, computations = hlo.parse(program.as_text())
    found = {
        name
        for name, computation in computations.items()
        for instruction in computation.instructions
        if instruction.shape == (rows, MODEL.vocab_size)
    }
    return found, hlo.always_run(entry, computations)


def test_what_is_equal_is_compiled_once(tiny_runner: ModelRunner) -> None:
    """Layers, and what shapes share; and two programs that change state alone. Nothing is kept on disk here."""
    assert MODEL.num_layers > 1
    buckets = BUCKETS.all_buckets()
    seqs, scored = {bucket.seqs for bucket in buckets}, {num_scored(bucket.tokens) for bucket in buckets}
    assert len(seqs) < len(buckets), "two shapes that differ in tokens alone"
    assert len(scored) < len(buckets), "two shapes that differ in sequences alone"
    assert tiny_runner.num_compiled == 3 * len(buckets) + len(seqs) + len(scored) + 2


def test_a_step_in_parts_is_the_whole_step(
    tiny_runner: ModelRunner, whole_of: Callable[[Bucket], Any]
) -> None:
    """The same requests through both, each with its own state: the same tokens, and logprobs but for rounding."""
    rng = np.random.default_rng(0)
    prompts = [ids(rng, n) for n in (1, 5, 17, 33)]
    in_parts = tiny_runner._executables
    whole = {bucket: whole_of(bucket) for bucket in BUCKETS.all_buckets()}
    answers = []
    for executables in (in_parts, whole):
        tiny_runner._executables = executables
        try:
            driver = Driver(tiny_runner)
            requests = [
                driver.admit(make_request(f"r{i}", prompt, temperature=0.0, logprobs=3))
                for i, prompt in enumerate(prompts)
            ]
            results = [driver.step(*((request, request.num_unplanned_tokens) for request in requests))]
            results += [driver.step(*((request, 1) for request in requests)) for _ in range(3)]
        finally:
            tiny_runner._executables = in_parts
        answers.append(([r.output_token_ids for r in requests], [r.logprobs for r in results]))
    (tokens, logprobs), (whole_tokens, whole_logprobs) = answers
    assert tokens == whole_tokens
    for step, whole_step in zip(logprobs, whole_logprobs, strict=True):
        for name, [entry] in step.items():
            assert entry.logprob == pytest.approx(whole_step[name][0].logprob, abs=1e-4)


@pytest.fixture(scope="module")
def dense_logprobs() -> Callable[[Sequence[int]], np.ndarray]:
    """token ids -> float64 log-probabilities [T, V], from a forward pass over the whole sequence."""
    logits = sequence_logits(MODEL, init_random(MODEL, jnp.float32))

    def run(token_ids: Sequence[int]) -> np.ndarray:
        x = logits(token_ids).astype(np.float64)
        x -= x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    return run


def check_entry(entry: TokenLogprobs, token: int, want_V: np.ndarray) -> None:
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(want_V[token], abs=2e-4)
    best = [pair[0] for pair in entry.top]
    np.testing.assert_allclose([pair[1] for pair in entry.top], np.sort(want_V)[::-1][: len(best)], atol=2e-4)
    np.testing.assert_allclose([pair[1] for pair in entry.top], want_V[best], atol=2e-4)
    assert abs(entry.rank - 1 - int((want_V > want_V[token] + 2e-4).sum())) <= 1


def ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, MODEL.vocab_size, count).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_packed_batches_equal_a_dense_forward(
    tiny_runner: ModelRunner, dense_logprobs: Callable[[Sequence[int]], np.ndarray], seed: int
) -> None:
    """Random mixtures of decode rows and prefill chunks: every token and logprob, prompts included."""
    rng = np.random.default_rng(seed)
    driver = Driver(tiny_runner, seed)
    lengths = [1, 4, 5, 31, 33, 64, 90, 127][: 8 - seed]
    requests = [
        make_request(f"r{i}", ids(rng, n), temperature=0.0, logprobs=20, prompt_logprobs=5 if i % 2 else None)
        for i, n in enumerate(lengths)
    ]
    waiting = list(requests)
    scored: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for _ in range(40):
        while waiting and rng.random() < 0.5:
            driver.admit(waiting.pop())
        parts: list[tuple[Request, int]] = []
        budget = int(rng.choice([2, 30, 64]))
        for request in requests:
            if (
                request.slot is None
                or request.num_tokens > 128
                or request.num_output_tokens >= 5
                or not budget
            ):
                continue
            left = min(request.num_tokens - request.num_computed_tokens, budget)
            count = left if rng.random() < 0.5 else int(rng.integers(1, left + 1))
            budget -= count
            parts.append((request, count))
        if len(parts) > 1 and sum(count for _, count in parts) == 2:
            parts = parts[:1]  # the smallest shape has one row
        if not parts:
            continue
        result = driver.step(*parts)
        assert not result.failed
        for request, _ in parts:
            scored[request.request_id] += result.prompt_logprobs.get(request.request_id, [])
            for entry in result.logprobs.get(request.request_id, []):
                before = request.token_ids(0, request.num_tokens - 1)
                want_V = dense_logprobs(before)[-1]
                check_entry(entry, request.output_token_ids[-1], want_V)
                assert want_V[entry.token_id] > want_V.max() - 2e-4, "greedy"
    assert sum(request.num_output_tokens for request in requests) >= 8
    for request in requests:
        if request.params.prompt_logprobs is not None and request.num_output_tokens:
            want_TV = dense_logprobs(request.prompt_token_ids)
            assert len(scored[request.request_id]) == request.num_prompt_tokens - 1
            for position, entry in enumerate(scored[request.request_id], start=1):
                check_entry(entry, request.prompt_token_ids[position], want_TV[position - 1])
                assert len(entry.top) == 5
    assert tiny_runner.serving_compilations == 0
