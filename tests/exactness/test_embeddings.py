"""An embedding is that of its prompt alone, however it is scheduled: by numpy's float64, and by its own bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.models.random_weights import init_random
from jaxserve.outputs import PooledTokens
from jaxserve.pooling import Pool, sum_hidden
from jaxserve.request import GenerationRequest, Pooling
from tests.engine_harness import Outcomes, ServedModel, ask, prompt_ids, run, serve
from tests.text_models import smollm2

TOLERANCE = 2e-6  # of components of a vector of length 1 in 64 dimensions; float32's epsilon is 1.2e-7
LENGTHS = (1, 2, 5, 31, 33, 64, 90, 200)
SHARED = prompt_ids("shared", 80)


def embed(name: str, prompt: int | Sequence[int], pooling: Pooling, **fields: Any) -> GenerationRequest:
    return ask(name, prompt, 0, stream=False, pooling=pooling, **fields)


def float64_hidden(model: ModelConfig, params: dict[str, Any], token_ids: Sequence[int]) -> np.ndarray:
    """The Llama of `model`, written down once more in numpy: final hidden states [T, D]."""
    weight = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731

    def norm(x_TD: np.ndarray, scale: Any) -> np.ndarray:
        return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + model.rms_norm_eps) * weight(scale)

    half = model.head_dim // 2
    angles = np.outer(np.arange(len(token_ids)), model.rope.theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x_THd: np.ndarray) -> np.ndarray:
        left, right = x_THd[..., :half], x_THd[..., half:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    x_TD = weight(params["embed_tokens"]["embedding"])[list(token_ids)]
    future = np.triu(np.full((len(token_ids),) * 2, -np.inf), 1)
    for layer in params["layers"].values():
        attention = {name: weight(part["kernel"]).T for name, part in layer["self_attn"].items()}
        normed = norm(x_TD, layer["input_layernorm"]["scale"])
        q, k, v = (
            (normed @ attention[f"{n}_proj"]).reshape(len(token_ids), -1, model.head_dim) for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(each, model.num_heads // model.num_kv_heads, 1) for each in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(model.head_dim) + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x_TD = x_TD + np.einsum("hts,shd->thd", weights, v).reshape(len(token_ids), -1) @ attention["o_proj"]
        mlp = {name: weight(part["kernel"]).T for name, part in layer["mlp"].items()}
        normed = norm(x_TD, layer["post_attention_layernorm"]["scale"])
        gate = normed @ mlp["gate_proj"]
        x_TD = x_TD + (gate / (1 + np.exp(-gate)) * (normed @ mlp["up_proj"])) @ mlp["down_proj"]
    return norm(x_TD, params["norm"]["scale"])


def expected(model: ServedModel, request: GenerationRequest) -> np.ndarray:
    hidden_TD = float64_hidden(model.model_config, model.params, request.prompt_token_ids)
    vector = hidden_TD.mean(0) if request.params.pooling == "mean" else hidden_TD[-1]
    return vector / np.linalg.norm(vector)


def vector_of(outcomes: Outcomes, name: str) -> np.ndarray:
    outcome = outcomes[name, 0]
    assert outcome.error is None
    assert outcome.token_ids == []
    assert outcome.text == ""
    assert outcome.num_outputs == 1
    assert outcome.embedding is not None
    assert outcome.embedding.dtype == np.float32
    return outcome.embedding


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_by_another_computation(tiny_model: ServedModel, pooling: Pooling) -> None:
    """Many lengths at once, cut into chunks, beside requests that generate; with prefixes in the cache."""
    asked = [embed(f"n{n}", n, pooling) for n in LENGTHS]
    asked += [embed(f"s{n}", [*SHARED, n], pooling) for n in (300, 301)]
    mates = [ask(f"mate{i}", 9 + 20 * i, 25) for i in range(3)]
    engine = tiny_model.engine(max_prefill_chunk=7)
    for _ in range(2):
        outcomes = run(engine, [*mates, *asked])
        for request in asked:
            difference = vector_of(outcomes, request.request_id) - expected(tiny_model, request)
            assert np.abs(difference).max() < TOLERANCE, request.request_id
    # A mean needs every token's hidden state, which no cache has; the last token's needs itself alone.
    assert outcomes["s301", 0].num_cached_tokens == (0 if pooling == "mean" else 80)
    for mate in mates:
        assert outcomes[mate.request_id, 0].token_ids == tiny_model.solo(mate)[0].token_ids


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_preempted_and_swapped(tiny_model: ServedModel, pooling: Pooling, overlap: bool) -> None:
    """What is computed again, or comes back from host memory, counts once."""
    background = [embed(f"b{i}", 150 + i, pooling) for i in range(3)]
    arrivals = {0: background, **{4 * i: [ask(f"a{i}", 60, 20, priority=-i)] for i in range(1, 8)}}
    options = {"num_blocks": 34, "num_host_blocks": 30, "clock": itertools.count().__next__}
    engine = tiny_model.engine(max_prefill_chunk=8, overlap=overlap, max_num_seqs=4, **options)
    outcomes = run(engine, arrivals)
    assert engine.stats.preemptions > 1
    for request in background:
        difference = vector_of(outcomes, request.request_id) - expected(tiny_model, request)
        assert np.abs(difference).max() < TOLERANCE, request.request_id


# Bits.

MODEL = ModelConfig("LlamaForCausalLM", 512, 64, 128, 2, 4, 2, 16, 2048)
OPTIONS = EngineConfig(
    dtype="bfloat16",
    max_model_len=256,
    max_num_seqs=12,
    max_num_batched_tokens=64,
    block_size=16,
    deterministic=True,
)


@pytest.fixture(scope="module")
def deterministic():
    blocks = resolve(OPTIONS, MODEL, platform="cpu").max_blocks_per_seq
    buckets = ShapeBuckets(((8, (2,)), (64, (12,))), blocks)
    served = serve(OPTIONS, MODEL, init_random(MODEL, jnp.bfloat16), smollm2(), buckets=buckets)
    yield served
    served.close()


BITS = [
    embed(f"{pooling}{n}", [token % 512 for token in prompt_ids(f"bits{n}", n)], pooling)
    for pooling in ("mean", "last")
    for n in (1, 17, 64, 190)
]


@pytest.fixture(scope="module")
def alone(deterministic: ServedModel) -> dict[str, bytes]:
    one_by_one = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_prefill_chunk": 1}
    engine = deterministic.engine(enable_prefix_caching=False, **one_by_one)
    return {r.request_id: vector_of(run(engine, [r]), r.request_id).tobytes() for r in BITS}


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    order=st.permutations(range(len(BITS))),
    steps=st.lists(st.integers(0, 12), min_size=len(BITS), max_size=len(BITS)),
    chunk=st.sampled_from([1, 5, 16, 33, 64]),
    seqs=st.sampled_from([1, 3, 12]),
    blocks=st.sampled_from([16, 20, 192]),
)
def test_bits_in_deterministic_mode(deterministic, alone, order, steps, chunk, seqs, blocks) -> None:
    arrivals: dict[int, list[GenerationRequest]] = {}
    for index, step in zip(order, steps, strict=True):
        arrivals.setdefault(step, []).append(BITS[index])
    engine = deterministic.engine(num_blocks=blocks, max_prefill_chunk=chunk, max_num_seqs=seqs)
    outcomes = run(engine, arrivals)
    for request in BITS:
        assert vector_of(outcomes, request.request_id).tobytes() == alone[request.request_id]


@settings(max_examples=50, deadline=None)
@given(
    hidden=npst.arrays(np.float32, (40, 3), elements=st.floats(-1e4, 1e4, width=32)),
    cuts=st.sets(st.integers(1, 39)),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_are_exact_in_any_order(hidden: np.ndarray, cuts: set[int], seed: int) -> None:
    shuffled = np.random.default_rng(seed).permutation(hidden)
    parts = [sum_hidden(part) for part in np.split(shuffled, sorted(cuts))]
    whole = sum_hidden(hidden)
    assert np.sum(parts, axis=0).tobytes() == (whole + 0.0).tobytes()
    assert np.abs(whole - hidden.astype(np.float64).sum(0)).max() <= len(hidden) * 2**-25


def test_a_gap_is_a_bug() -> None:
    pool = Pool("mean", 10)
    pool.add(PooledTokens(0, 4, np.ones(2)))
    assert pool.embedding() is None
    with pytest.raises(RuntimeError, match="tokens from 5 on"):
        pool.add(PooledTokens(5, 5, np.ones(2)))
    pool.add(PooledTokens(0, 4, np.ones(2)))  # preempted, and begun again
    pool.add(PooledTokens(4, 6, np.ones(2)))
    vector = pool.embedding()
    assert vector is not None
    assert vector.tolist() == [np.float32(0.5**0.5)] * 2
