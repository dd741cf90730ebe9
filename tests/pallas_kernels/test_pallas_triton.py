"""The Pallas Triton backend: interpreted against the float64 reference, with NaN in every slot that no token fills,
and lowered for GPUs that are not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.paged_attention import (
    H200,
    AttentionSpec,
    Backend,
    DeviceFacts,
    ragged_paged_attention,
    resolve_backend,
)
from pallas_kernels.paged_attention.split_k import cut_rows
from tests.pallas_kernels.problems import (
    Problem,
    appended_to,
    backend_for,
    expected,
    in_dtype,
    make_problem,
    padded_to,
    products,
    quantised,
    run,
    run_decode,
)

A100 = DeviceFacts("gpu", (8, 0), 108)
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-2}
MAX_SPLITS = 4
# Decode rows of one split, of several, and of more tiles than splits; chunks that start a sequence, that cross tiles
# of the context and of the queries, and that lie within one.
CONTEXTS, QUERY_LENS = [600, 0, 63, 64, 130, 0, 200, 30, 500], [1, 1, 1, 1, 1, 3, 90, 70, 20]


def interpreted(problem: Problem) -> Backend:
    """The backend with splits so short that a test's contexts have several."""
    backend = backend_for("pallas-triton-interpret", problem)
    assert backend.tuning is not None
    return dataclasses.replace(
        backend, tuning=dataclasses.replace(backend.tuning, split_tokens=64), max_splits=MAX_SPLITS
    )


def problem_of(*, group: int, block_size: int, head_dim: int, seed: int = 0, **features) -> Problem:
    """A mixed batch with padding in every dimension; the padding queries are NaN."""
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=CONTEXTS,
        query_lens=QUERY_LENS,
        heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        pad_tokens=5,
        pad_seqs=2,
        pad_blocks=1,
    )
    problem.q[-5:] = np.nan
    return dataclasses.replace(problem, **features)


def assert_matches(problem: Problem) -> None:
    out = run(problem, interpreted(problem))
    real = problem.cu_q_lens[problem.num_seqs]
    assert not out[real:].any(), "padding rows are 0"
    truth = expected(problem)
    error = np.abs(out[:real] - truth[:real]).max()
    assert error <= TOLERANCE[problem.dtype] * np.abs(truth).max()


@pytest.mark.parametrize(
    ("group", "block_size", "head_dim", "window", "cap"),
    [
        (1, 8, 64, None, None),
        (3, 16, 96, 50, None),
        (4, 32, 128, None, 3.0),
        (7, 128, 64, 100, 1.5),
        (8, 16, 256, None, None),
        (16, 8, 64, 1, None),
    ],
)
def test_float32_matches_reference(group, block_size, head_dim, window, cap) -> None:
    assert_matches(
        problem_of(group=group, block_size=block_size, head_dim=head_dim, sliding_window=window, soft_cap=cap)
    )


@pytest.mark.parametrize(
    ("dtype", "group", "block_size", "head_dim", "window", "cap"),
    [
        ("bfloat16", 4, 16, 128, None, None),
        ("bfloat16", 3, 128, 96, 100, None),
        ("float16", 7, 32, 64, 130, 3.0),
        ("float16", 8, 8, 256, None, None),
    ],
)
def test_half_precision_matches_reference(dtype, group, block_size, head_dim, window, cap) -> None:
    problem = problem_of(
        group=group, block_size=block_size, head_dim=head_dim, sliding_window=window, soft_cap=cap
    )
    assert_matches(in_dtype(problem, dtype))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "per", "block_size", "window"),
    [
        ("float32", "int8", "both", 128, None),
        ("float32", "float8_e4m3fn", "head", 16, 70),
        ("bfloat16", "int8", "block", 16, 70),
        ("bfloat16", "float8_e4m3fn", "both", 128, None),
        ("float16", "float8_e5m2", "block", 8, None),
    ],
)
def test_quantised_caches(dtype, kv_dtype, per, block_size, window) -> None:
    problem = problem_of(group=3, block_size=block_size, head_dim=64, sliding_window=window)
    problem = quantised(
        in_dtype(problem, dtype) if dtype != "float32" else problem,
        kv_dtype,
        np.random.default_rng(1),
        per=per,
    )
    assert problem.v_scale is not None
    # So small that float16 could not hold a weight times a scale.
    assert_matches(dataclasses.replace(problem, v_scale=problem.v_scale * np.float32(1e-4)))


LENGTHS = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 31, 32, 33, 70])), min_size=1, max_size=7
)


@pytest.mark.parametrize(("group", "block_size", "window"), [(3, 16, None), (4, 8, 75)])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_ragged_lengths(group, block_size, window, seed, lengths) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        heads=2 * group,
        kv_heads=2,
        head_dim=16,
        block_size=block_size,
    )
    width = -(-270 // block_size) + 1
    problem = padded_to(problem, tokens=7 * 70 + 6, seqs=8, width=width, blocks=7 * width + 4)
    assert_matches(dataclasses.replace(problem, sliding_window=window))


SHAPE = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 32}


@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", 100)])
def test_a_row_does_not_depend_on_its_batch_mates(dtype: str, window: int | None) -> None:
    """Bit for bit: alone, last of many, in other paddings."""
    rng = np.random.default_rng(7)
    mates = make_problem(rng, contexts=[600, 1, 90, 411], query_lens=[1, 1, 1, 50], **SHAPE)
    for query_len in (1, 37):
        alone = make_problem(rng, contexts=[333], query_lens=[query_len], pad_tokens=3, **SHAPE)
        together, row = appended_to(mates, alone)
        alone = padded_to(alone, tokens=40, seqs=1, width=14, blocks=20)
        together = padded_to(together, tokens=100, seqs=7, width=24, blocks=80)
        alone, together = (
            dataclasses.replace(in_dtype(problem, dtype), sliding_window=window)
            for problem in (alone, together)
        )
        splits = cut_rows(
            alone.seq_lens, block_k=64, split_tokens=64, max_splits=MAX_SPLITS, sliding_window=window
        )
        assert int(splits.num_splits[0]) > 1
        np.testing.assert_array_equal(
            run(alone, interpreted(alone))[:query_len],
            run(together, interpreted(together))[row : row + query_len],
        )


def test_decode_is_the_ragged_case_of_single_rows() -> None:
    problem = make_problem(
        np.random.default_rng(3),
        contexts=[0, 7, 8, 300, 31],
        query_lens=[1] * 5,
        heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=8,
        pad_seqs=3,
        pad_tokens=3,
    )
    problem = dataclasses.replace(problem, scale=-problem.scale)  # the largest product has the smallest score
    backend = interpreted(problem)
    out = run_decode(problem, backend)
    truth = expected(problem)[:5]
    assert np.abs(out[:5] - truth).max() <= 2e-6 * np.abs(truth).max()
    assert not out[5:].any()
    np.testing.assert_array_equal(out, run(problem, backend))
    fewer = run_decode(dataclasses.replace(problem, num_seqs=2), backend)
    np.testing.assert_array_equal(fewer[:2], out[:2])
    assert not fewer[2:].any(), "rows from num_seqs on are 0"


GROUPS, BLOCK_SIZES = (1, 3, 4, 7, 8, 16), (8, 16, 32, 128)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("bfloat16", "int8"),
        ("float16", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
        ("float32", "int8"),
    ],
)
def test_lowers_for_an_h200(dtype: str, kv_dtype: str, head_dim: int) -> None:
    """Groups and block sizes take turns."""
    turn = len(dtype) + len(kv_dtype) + head_dim // 32
    group, block_size = GROUPS[turn % len(GROUPS)], BLOCK_SIZES[turn % len(BLOCK_SIZES)]
    spec = AttentionSpec(2 * group, 2, head_dim, block_size, dtype, kv_dtype)
    features = {"sliding_window": 100, "soft_cap": 30.0} if turn % 2 else {}
    text = _lowered(spec, H200, "NVIDIA H200", **features)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3, "decode, its combination, prefill"


@pytest.mark.parametrize(
    ("group", "block_size"), [*((group, 16) for group in GROUPS), *((4, size) for size in BLOCK_SIZES)]
)
def test_lowers_every_group_and_block_size(group: int, block_size: int) -> None:
    _lowered(AttentionSpec(2 * group, 2, 128, block_size, "bfloat16", "bfloat16"), H200, "NVIDIA H200")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e5m2"])
def test_lowers_for_an_a100(kv_dtype: str) -> None:
    _lowered(AttentionSpec(32, 8, 128, 16, "bfloat16", kv_dtype), A100, "NVIDIA A100")


def test_every_float32_product_is_full_precision() -> None:
    """B136: without TF32, which the interpreter could not show."""
    spec = AttentionSpec(9, 3, 64, 16, "float32", "float32")
    found = list(products(_traced(spec, H200, "NVIDIA H200").jaxpr))
    assert len(found) >= 4, "scores and values, of decode rows and of chunks"
    assert {precision for each in found for precision in each.params["precision"] or (None,)} == {
        jax.lax.Precision.HIGHEST
    }


def test_says_what_it_does_not_run() -> None:
    spec = AttentionSpec(32, 8, 128, 16, "bfloat16", "bfloat16")

    def refuse(match: str, device: DeviceFacts = H200, name: str = "pallas-triton", **changes) -> None:
        with pytest.raises(NotImplementedError, match=match):
            resolve_backend(name, spec=dataclasses.replace(spec, **changes), device=device)

    refuse("head_dim that is a multiple of 8 up to 256, not 320", head_dim=320)
    refuse("head_dim that is a multiple of 8 up to 256, not 100", head_dim=100)
    refuse("up to 64 query heads for each KV head, not 128", num_heads=128, num_kv_heads=1)
    refuse("not bfloat16 over float16", kv_dtype="float16")
    refuse("8.0", DeviceFacts("gpu", (7, 5), 40))
    refuse("8.9", A100, kv_dtype="float8_e4m3fn")
    resolve_backend(
        "pallas-triton-interpret",
        spec=dataclasses.replace(spec, kv_dtype="float8_e4m3fn"),
        device=DeviceFacts("cpu"),
    )


def test_refuses_a_cache_whose_offsets_overflow() -> None:
    spec = AttentionSpec(32, 8, 128, 16, "bfloat16", "int8")
    with pytest.raises(NotImplementedError, match="2 to 4 GiB"):
        _lowered(spec, H200, "NVIDIA H200", num_blocks=2**31 // (8 * 16 * 128) + 1)
    _lowered(spec, H200, "NVIDIA H200", num_blocks=2**31 // (8 * 16 * 128))


def _lowered(spec: AttentionSpec, device: DeviceFacts, device_kind: str, **changes) -> str:
    """StableHLO for a GPU of that kind, of a call of 64 tokens and 8 sequences."""
    with jax.sharding.use_abstract_mesh(_mesh(device, device_kind)):
        return _traced(spec, device, device_kind, **changes).lower(lowering_platforms=("cuda",)).as_text()


def _mesh(device: DeviceFacts, device_kind: str) -> AbstractMesh:
    assert device.num_sms is not None
    gpu = AbstractDevice(device_kind=device_kind, num_cores=device.num_sms, platform="gpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=gpu)


def _traced(
    spec: AttentionSpec, device: DeviceFacts, device_kind: str, *, num_blocks: int = 1000, **features
) -> Any:
    backend = resolve_backend("pallas-triton", spec=spec, device=device)
    array = jax.ShapeDtypeStruct
    cache = array((num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim), spec.kv_dtype)
    scale = array((num_blocks, spec.num_kv_heads), jnp.float32) if spec.is_quantised else None

    def call(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, **arguments) -> jax.Array:
        return ragged_paged_attention(
            q, k_cache, v_cache, scale=0.1, backend=backend, **arguments, **features
        )

    with jax.sharding.use_abstract_mesh(_mesh(device, device_kind)):
        return jax.jit(call).trace(
            array((64, spec.num_heads, spec.head_dim), spec.dtype),
            cache,
            cache,
            block_tables_SB=array((8, 32), jnp.int32),
            seq_lens_S=array((8,), jnp.int32),
            cu_q_lens=array((9,), jnp.int32),
            num_decodes=array((), jnp.int32),
            num_seqs=array((), jnp.int32),
            k_scale=scale,
            v_scale=scale,
        )
