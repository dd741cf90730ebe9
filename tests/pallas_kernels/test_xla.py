"""The XLA backend against the float64 reference, with NaN in every slot that no token fills."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import XLA, Backend, ragged_paged_attention
from tests.pallas_kernels.problems import (
    Problem,
    appended_to,
    decoded,
    expected,
    in_dtype,
    last_chunk,
    make_problem,
    padded_to,
    products,
    quantised,
    run,
    run_decode,
)

LENGTHS = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 31, 32, 33, 70])), min_size=1, max_size=11
)


@pytest.mark.parametrize(
    ("kv_heads", "group", "block_size"), [(1, 1, 8), (2, 3, 16), (3, 4, 32), (1, 7, 8), (2, 8, 16)]
)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_matches_reference(kv_heads, group, block_size, seed, lengths) -> None:
    _check_random(kv_heads, group, block_size, seed, lengths)


@pytest.mark.parametrize(("window", "cap"), [(1, None), (17, None), (128, 3.0), (200, None), (None, 1.5)])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_sliding_window_and_soft_cap(window, cap, seed, lengths) -> None:
    _check_random(2, 3, 16, seed, lengths, sliding_window=window, soft_cap=cap)


def _check_random(kv_heads, group, block_size, seed, lengths, **features) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16,
        block_size=block_size,
    )
    problem = dataclasses.replace(problem, **features)
    out = run(padded_to(problem, tokens=11 * 70 + 6, seqs=12, width=30, blocks=11 * 28 + 4), XLA)
    assert np.isfinite(out).all(), "padding rows must be finite as well"
    real = problem.cu_q_lens[problem.num_seqs]
    np.testing.assert_allclose(out[:real], expected(problem)[:real], atol=4e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_window_edges(dtype: str) -> None:
    for context in (0, 127, 128, 129, 255, 256, 1000):
        problem = padded_to(_half_precision(context, dtype), tokens=41, seqs=2, width=32, blocks=40)
        _assert_close_in_half_precision(problem)


@pytest.mark.parametrize("context", [127, 128])
def test_tables_that_end_where_a_window_does_and_just_behind(context: int) -> None:
    _assert_close_in_half_precision(_half_precision(context, "bfloat16"))


def _half_precision(context: int, dtype: str) -> Problem:
    rng = np.random.default_rng(context)
    problem = make_problem(
        rng, contexts=[context, 5], query_lens=[1, 40], heads=9, kv_heads=3, head_dim=64, block_size=32
    )
    return in_dtype(problem, dtype)


def _assert_close_in_half_precision(problem: Problem) -> None:
    truth = expected(problem)
    assert np.abs(run(problem, XLA) - truth).max() <= 1e-2 * np.abs(truth).max()


# Every dtype, each way of scaling, both precisions.
@pytest.mark.parametrize(
    ("kv_dtype", "per", "dtype"),
    [
        ("int8", "block", "float32"),
        ("int8", "head", "float32"),
        ("int8", "both", "bfloat16"),
        ("float8_e4m3fn", "block", "bfloat16"),
        ("float8_e4m3fn", "both", "float32"),
        ("float8_e5m2", "both", "float32"),
        ("float8_e5m2", "head", "bfloat16"),
    ],
)
def test_quantised_caches(kv_dtype: str, per: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    problem = make_problem(
        rng, contexts=[300, 7, 20], query_lens=[1, 1, 40], heads=6, kv_heads=2, head_dim=32, block_size=16
    )
    problem = quantised(problem, kv_dtype, rng, per=per)
    if dtype != "float32":
        problem = dataclasses.replace(in_dtype(problem, dtype), kv_dtype=kv_dtype)
    truth, tolerance = expected(problem), 4e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(run(problem, XLA), truth, atol=tolerance * np.abs(truth).max(), rtol=0)


@pytest.mark.parametrize(("query_len", "window"), [(1, None), (37, 100)])
def test_a_row_does_not_depend_on_its_batch_mates(query_len: int, window: int | None) -> None:
    """Bit for bit: alone, last of many, in other paddings."""
    rng = np.random.default_rng(7)
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 32}
    alone = make_problem(rng, contexts=[333], query_lens=[query_len], pad_tokens=3, **shape)
    mates = make_problem(rng, contexts=[600, 1, 90, 411], query_lens=[1, 1, 1, 50], **shape)
    alone, mates = (dataclasses.replace(problem, sliding_window=window) for problem in (alone, mates))
    together, row = appended_to(mates, alone)
    np.testing.assert_array_equal(run(alone, XLA)[:query_len], run(together, XLA)[row : row + query_len])


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [
        (3, 1, 64, "bfloat16"),
        (3, 3, 64, "float32"),
        (2, 8, 64, "bfloat16"),
    ],
)
def test_deterministic_rows_do_not_depend_on_how_they_are_computed(kv_heads, group, head_dim, dtype) -> None:
    """Bit for bit: the last rows of a chunk, decoded instead, a few or many at a time, or in a smaller chunk."""
    backend = dataclasses.replace(XLA, deterministic=True)
    shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": 16}
    whole = make_problem(np.random.default_rng(700), contexts=[663], query_lens=[37], **shape)
    # Wide queries: peaks that move from window to window.
    whole = in_dtype(dataclasses.replace(whole, q=2 * whole.q), dtype)
    rows = run(whole, backend)
    np.testing.assert_allclose(rows, expected(whole), atol=4e-6 if dtype == "float32" else 3e-2, rtol=0)
    for count in (2, 9):
        np.testing.assert_array_equal(run(decoded(whole, count), backend), rows[-count:])
    np.testing.assert_array_equal(run(last_chunk(whole, 5), backend), rows[-5:])


def _traced(*, tokens: int, seqs: int, backend: Backend = XLA) -> Any:
    """A float32 call of that size, for nobody to run."""
    array = jax.ShapeDtypeStruct
    cache = array((2000, 3, 16, 64), jnp.float32)
    return jax.jit(partial(ragged_paged_attention, scale=0.1, backend=backend)).trace(
        array((tokens, 9, 64), jnp.float32),
        cache,
        cache,
        block_tables_SB=array((seqs, 32), jnp.int32),
        seq_lens_S=array((seqs,), jnp.int32),
        cu_q_lens=array((seqs + 1,), jnp.int32),
        num_decodes=array((), jnp.int32),
        num_seqs=array((), jnp.int32),
    )


@pytest.mark.parametrize("tokens_each", [1, 16])
def test_memory_grows_as_the_batch_does(tokens_each: int) -> None:
    """B210: scores, or a mask, of every token of a batch against every other's would grow with its square."""
    few, many = (
        _traced(tokens=tokens_each * seqs, seqs=seqs).lower().compile().memory_analysis().temp_size_in_bytes
        for seqs in (16, 256)
    )
    assert few > 0
    assert many < 16 * few * 1.5


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_float32_product_is_full_precision(deterministic: bool) -> None:
    """B136: one left at the default would be rounded to TF32 on a GPU, which no CPU run could show."""
    backend = dataclasses.replace(XLA, deterministic=deterministic)
    found = list(products(_traced(tokens=32, seqs=4, backend=backend).jaxpr))
    assert len(found) >= 4, "scores and values, of decode rows and of chunks"
    assert {precision for each in found for precision in each.params["precision"] or (None,)} == {
        jax.lax.Precision.HIGHEST
    }


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
    out = run_decode(problem, XLA)
    np.testing.assert_allclose(out[:5], expected(problem)[:5], atol=3e-6, rtol=0)
    assert not out[5:].any()
    fewer = run_decode(dataclasses.replace(problem, num_seqs=2), XLA)
    np.testing.assert_array_equal(fewer[:2], out[:2])
    assert not fewer[2:].any(), "rows from num_seqs on are 0"


def test_nan_of_one_row_stays_there() -> None:
    """A row whose own tokens are NaN must fail alone, though its windows share tiles with others'."""
    problem = make_problem(
        np.random.default_rng(4),
        contexts=[140, 300, 999, 0, 70],
        query_lens=[1] * 5,
        heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=16,
    )
    v_cache = problem.v_cache.copy()
    v_cache[problem.block_tables[0, 0]] = np.nan
    out = run_decode(dataclasses.replace(problem, v_cache=v_cache), XLA)
    healthy = [1, 2, 3, 4]
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[healthy], run_decode(problem, XLA)[healthy])
