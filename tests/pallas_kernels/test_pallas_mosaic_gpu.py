"""The Mosaic GPU backend: interpreted against the float64 reference with NaN in every slot that no token fills,
searched for races, and lowered for GPUs that are not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import (
    H200,
    AttentionSpec,
    DeviceFacts,
    resolve_backend,
)
from tests.pallas_kernels.mosaic import (
    INTERPRETED,
    MAX_SPLITS,
    SEARCH_RACES,
    assert_lowers_for_an_h200,
    assert_matches,
    found_races,
    interpreted,
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
    run,
    run_decode,
)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "head_dim", "block_size", "window", "cap"),
    [
        ("bfloat16", 2, 1, 64, 16, None, None),
        ("float16", 2, 3, 64, 8, 50, None),
        ("bfloat16", 1, 4, 128, 32, None, 3.0),
        ("bfloat16", 2, 7, 64, 128, 100, 1.5),
        ("bfloat16", 1, 8, 256, 64, None, None),
        ("float16", 1, 16, 96, 32, 1, None),
    ],
)
def test_matches_reference(dtype, kv_heads, group, head_dim, block_size, window, cap) -> None:
    problem = mixed_batch(
        group=group,
        block_size=block_size,
        head_dim=head_dim,
        kv_heads=kv_heads,
        sliding_window=window,
        soft_cap=cap,
    )
    problem = in_dtype(problem, dtype)
    assert_matches(problem, run(problem, interpreted(problem)))


SHAPE = {"heads": 3, "kv_heads": 1, "head_dim": 64, "block_size": 32}
# Problems of this shape with this room and window share a program: to compile one takes longer than to run it.
ROOM = {"tokens": 173, "seqs": 5, "width": 14, "blocks": 48}
WINDOW = 90

LENGTHS = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from([1, 1, 2, 21, 42, 43])), min_size=1, max_size=4
)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), lengths=LENGTHS)
def test_ragged_lengths(seed, lengths) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        **SHAPE,
    )
    problem = windowed(padded_to(in_dtype(problem, "bfloat16"), **ROOM))
    assert_matches(problem, run(problem, interpreted(problem)))


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """Bit for bit: alone, last of many, in other paddings."""
    rng = np.random.default_rng(7)
    lone = [
        in_dtype(make_problem(rng, contexts=[170], query_lens=[queries], **SHAPE), "bfloat16")
        for queries in (1, 37)
    ]
    together = in_dtype(make_problem(rng, contexts=[250, 90], query_lens=[1, 30], **SHAPE), "bfloat16")
    rows = []
    for alone in lone:  # the decode row first: the chunk goes behind it
        together, row = appended_to(together, alone)
        rows.append(row)
    together = windowed(padded_to(together, **ROOM))
    out = run_exactly(together, interpreted(together))
    for alone, row in zip(lone, rows, strict=True):
        count = alone.cu_q_lens[1]
        alone = windowed(padded_to(alone, tokens=40, seqs=1, width=8, blocks=12))
        np.testing.assert_array_equal(run_exactly(alone, interpreted(alone))[:count], out[row : row + count])


def test_a_row_does_not_depend_on_how_its_prompt_was_cut() -> None:
    """Bit for bit: a prompt's last rows as part of one chunk, and as a chunk of their own."""
    whole = make_problem(np.random.default_rng(8), contexts=[0], query_lens=[150], **SHAPE)
    whole = windowed(padded_to(in_dtype(whole, "bfloat16"), **ROOM))
    out = run_exactly(whole, interpreted(whole))
    for count in (97, 2):
        q = np.zeros_like(whole.q)
        q[:count] = whole.q[150 - count : 150]
        part = dataclasses.replace(whole, q=q, cu_q_lens=np.minimum(whole.cu_q_lens, count))
        np.testing.assert_array_equal(run_exactly(part, interpreted(part))[:count], out[150 - count : 150])


def windowed(problem: Problem) -> Problem:
    return dataclasses.replace(problem, sliding_window=WINDOW)


def test_decode_is_the_ragged_case_of_single_rows() -> None:
    problem = make_problem(
        np.random.default_rng(3),
        contexts=[0, 63, 64, 250],
        query_lens=[1] * 4,
        pad_seqs=2,
        pad_tokens=2,
        **SHAPE,
    )
    problem = in_dtype(problem, "bfloat16")
    backend = interpreted(problem)
    out = run_decode(problem, backend)
    truth = expected(problem)[:4]
    assert np.abs(out[:4] - truth).max() <= 1e-2 * np.abs(truth).max()
    assert not out[4:].any()
    np.testing.assert_array_equal(out, run(problem, backend))
    fewer = run_decode(dataclasses.replace(problem, num_seqs=2), backend)
    np.testing.assert_array_equal(fewer[:2], out[:2])
    assert not fewer[2:].any(), "rows from num_seqs on are 0"


@pytest.mark.parametrize("only", ["decode", "prefill"])
def test_no_races(only: str) -> None:
    contexts, query_lens = ([250, 130, 70], [1, 1, 1]) if only == "decode" else ([150, 0], [30, 50])
    problem = make_problem(np.random.default_rng(4), contexts=contexts, query_lens=query_lens, **SHAPE)
    problem = in_dtype(problem, "bfloat16")
    backend = interpreted(problem, max_splits=MAX_SPLITS - 1)
    truth = expected(problem)
    out, raced = search_races(problem, backend, only_decode=only == "decode")
    assert np.abs(out - truth).max() <= 1e-2 * np.abs(truth).max()
    assert not raced


@pytest.mark.parametrize("committed", [True, False])
def test_the_search_finds_a_planted_race(committed: bool) -> None:
    """Shared memory that is written and copied out by TMA, with and without the commit between."""

    def body(x_ref: Any, out_ref: Any, smem: Any) -> None:
        smem[...] = x_ref[...]
        if committed:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        interpret=SEARCH_RACES,
    )(jnp.zeros(128))
    assert found_races() != committed


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "block_size", "features"),
    [
        ("bfloat16", 64, 3, 8, {}),
        ("bfloat16", 64, 7, 128, {"sliding_window": 100, "soft_cap": 30.0}),
        ("float16", 96, 16, 16, {}),
        ("bfloat16", 128, 4, 32, {"sliding_window": 100}),
        ("bfloat16", 256, 1, 64, {"soft_cap": 30.0}),
        ("float16", 256, 8, 16, {}),
    ],
)
def test_lowers_for_an_h200(dtype, head_dim, group, block_size, features) -> None:
    assert_lowers_for_an_h200(AttentionSpec(2 * group, 2, head_dim, block_size, dtype, dtype), **features)


def test_says_what_it_does_not_run() -> None:
    spec = AttentionSpec(32, 8, 128, 16, "bfloat16", "bfloat16")

    def refuse(match: str, device: DeviceFacts = H200, **changes) -> None:
        with pytest.raises(NotImplementedError, match=match):
            resolve_backend("pallas-mosaic-gpu", spec=dataclasses.replace(spec, **changes), device=device)

    refuse("compute capability 9.0", DeviceFacts("gpu", (8, 0), 108))
    refuse("compute capability 9.0", DeviceFacts("gpu", (10, 0), 148))
    refuse("bfloat16 or float16", dtype="float32", kv_dtype="float32")
    refuse("not float32 over int8", dtype="float32", kv_dtype="int8")
    refuse("not bfloat16 over float16", kv_dtype="float16")
    refuse("up to head_dim 128, not 256", kv_dtype="int8", head_dim=256)
    refuse("head_dim 64, 96, 128, 256, not 80", head_dim=80)
    refuse("block sizes 8, 16, 32, 64, 128, not 24", block_size=24)
    refuse("up to 64 query heads", num_heads=128, num_kv_heads=1)
    resolve_backend(INTERPRETED, spec=spec, device=DeviceFacts("cpu"))
