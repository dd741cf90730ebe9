"""int8 and fp8 caches in the Mosaic GPU backend, proved as `test_pallas_mosaic_gpu` proves the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import AttentionSpec
from tests.pallas_kernels.mosaic import (
    MAX_SPLITS,
    NUM_BLOCKS,
    assert_lowers_for_an_h200,
    assert_matches,
    interpreted,
    interpreter_process,
    mixed_batch,
    run_exactly,
    search_races,
)
from tests.pallas_kernels.problems import (
    Problem,
    appended_to,
    expected,
    in_dtype,
    make_problem,
    padded_to,
    quantised,
    run,
)

SHAPE = {"heads": 3, "kv_heads": 1, "head_dim": 64, "block_size": 16}
# Problems of this shape with this room and window share a program: to compile one takes longer than to run it.
ROOM = {"tokens": 173, "seqs": 5, "width": 20, "blocks": 80}
WINDOW = 90


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with interpreter_process() as pool:
        yield pool


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "per", "group", "head_dim", "block_size", "window", "cap"),
    [
        ("bfloat16", "int8", "block", 7, 64, 16, 100, 1.5),
        ("float16", "float8_e4m3fn", "both", 3, 96, 8, None, None),
        ("bfloat16", "float8_e5m2", "head", 4, 128, 128, 50, 3.0),
    ],
)
def test_matches_reference(
    interpreter, dtype, kv_dtype, per, group, head_dim, block_size, window, cap
) -> None:
    problem = mixed_batch(
        group=group,
        block_size=block_size,
        head_dim=head_dim,
        kv_heads=2,
        contexts=(200, 6, 63, 70, 0),
        sliding_window=window,
        soft_cap=cap,
    )
    problem = quantised(in_dtype(problem, dtype), kv_dtype, np.random.default_rng(1), per=per)
    assert problem.v_scale is not None
    # So small that float16 could not hold a weight times a scale.
    problem = dataclasses.replace(problem, v_scale=problem.v_scale * np.float32(1e-4))
    assert_matches(problem, interpreter.submit(run, problem, interpreted(problem)).result())


LENGTHS = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 2, 21, 42, 43])), min_size=1, max_size=4
)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_ragged_lengths(interpreter, seed, lengths) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        **SHAPE,
    )
    problem = windowed(padded_to(by_block(problem, "float8_e4m3fn", np.random.default_rng(seed)), **ROOM))
    assert_matches(problem, interpreter.submit(run, problem, interpreted(problem)).result())


def test_a_row_does_not_depend_on_its_batch_mates(interpreter) -> None:
    """Bit for bit: alone, last of many, in other paddings."""
    rng = np.random.default_rng(7)
    lone = [
        by_block(make_problem(rng, contexts=[context], query_lens=[queries], **SHAPE), "float8_e4m3fn", rng)
        for context, queries in ((170, 1), (100, 37))
    ]
    together = make_problem(rng, contexts=[100, 40], query_lens=[1, 20], **SHAPE)
    together = by_block(together, "float8_e4m3fn", rng)
    rows = []
    for alone in lone:  # the decode row first: the chunk goes behind it
        together, row = appended_to(together, alone)
        rows.append(row)
    together = windowed(padded_to(together, **ROOM))
    out = interpreter.submit(run_exactly, together, interpreted(together)).result()
    for alone, row in zip(lone, rows, strict=True):
        count = alone.cu_q_lens[1]
        alone = windowed(padded_to(alone, tokens=40, seqs=1, width=14, blocks=20))
        found = interpreter.submit(run_exactly, alone, interpreted(alone)).result()
        np.testing.assert_array_equal(found[:count], out[row : row + count])


def test_a_row_does_not_depend_on_how_its_prompt_was_cut(interpreter) -> None:
    """Bit for bit: a prompt's last rows as part of one chunk, and as a chunk of their own."""
    whole = make_problem(np.random.default_rng(8), contexts=[0], query_lens=[150], **SHAPE)
    whole = windowed(padded_to(by_block(whole, "float8_e4m3fn", np.random.default_rng(9)), **ROOM))
    out = interpreter.submit(run_exactly, whole, interpreted(whole)).result()
    count = 97
    q = np.zeros_like(whole.q)
    q[:count] = whole.q[150 - count : 150]
    part = dataclasses.replace(whole, q=q, cu_q_lens=np.minimum(whole.cu_q_lens, count))
    found = interpreter.submit(run_exactly, part, interpreted(part)).result()
    np.testing.assert_array_equal(found[:count], out[150 - count : 150])


@pytest.mark.parametrize("only", ["decode", "prefill"])
def test_no_races(interpreter, only: str) -> None:
    contexts, query_lens = ([330, 130, 70], [1, 1, 1]) if only == "decode" else ([190, 0], [30, 50])
    problem = make_problem(np.random.default_rng(4), contexts=contexts, query_lens=query_lens, **SHAPE)
    problem = by_block(problem, "float8_e4m3fn", np.random.default_rng(5))
    backend = interpreted(problem, max_splits=MAX_SPLITS - 1)
    out, raced = interpreter.submit(search_races, problem, backend, only_decode=only == "decode").result()
    truth = expected(problem)
    assert np.abs(out - truth).max() <= 1e-2 * np.abs(truth).max()
    assert not raced


def windowed(problem: Problem) -> Problem:
    return dataclasses.replace(problem, sliding_window=WINDOW)


def by_block(problem: Problem, kv_dtype: str, rng: np.random.Generator) -> Problem:
    return quantised(in_dtype(problem, "bfloat16"), kv_dtype, rng, per="block")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "group", "block_size", "features"),
    [
        ("bfloat16", "float8_e4m3fn", 128, 7, 128, {"sliding_window": 100, "soft_cap": 30.0}),
        ("float16", "int8", 96, 16, 16, {}),
    ],
)
def test_lowers_for_an_h200(dtype, kv_dtype, head_dim, group, block_size, features) -> None:
    spec = AttentionSpec(2 * group, 2, head_dim, block_size, dtype, kv_dtype)
    by_block, by_head = (
        jax.ShapeDtypeStruct((NUM_BLOCKS, 1), "float32"),
        jax.ShapeDtypeStruct((1, 2), "float32"),
    )
    assert_lowers_for_an_h200(spec, scales={"k_scale": by_block, "v_scale": by_head}, **features)
