"""Every backend against the float64 reference, with NaN in every slot that no token fills."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import (
    available_backends,
    paged_decode,
    ragged_paged_attention,
    reference,
    resolve_backend,
)
from tests.pallas_kernels.problems import Problem, make_problem

BACKENDS = available_backends()


_compiled = jax.jit(ragged_paged_attention, static_argnames=("scale", "backend"))


def run(problem: Problem, backend: str, dtype=jnp.float32) -> np.ndarray:
    out = _compiled(
        jnp.asarray(problem.q, dtype),
        jnp.asarray(problem.k_cache, dtype),
        jnp.asarray(problem.v_cache, dtype),
        block_tables_SB=problem.block_tables,
        seq_lens_S=problem.seq_lens,
        cu_q_lens=problem.cu_q_lens,
        num_decodes=np.int32(problem.num_decodes),
        num_seqs=np.int32(problem.num_seqs),
        scale=problem.scale,
        backend=backend,
    )
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def expected(problem: Problem) -> np.ndarray:
    return reference.ragged_paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        block_tables_SB=problem.block_tables,
        seq_lens_S=problem.seq_lens,
        cu_q_lens=problem.cu_q_lens,
        num_seqs=problem.num_seqs,
        scale=problem.scale,
    )


def padded_to(problem: Problem, tokens: int, seqs: int, width: int, blocks: int) -> Problem:
    """The same problem in one fixed shape, so that random lengths share one executable."""
    more = seqs - len(problem.seq_lens)
    return dataclasses.replace(
        problem,
        q=np.pad(problem.q, ((0, tokens - len(problem.q)), (0, 0), (0, 0))),
        k_cache=_more_blocks(problem.k_cache, blocks),
        v_cache=_more_blocks(problem.v_cache, blocks),
        block_tables=np.pad(problem.block_tables, ((0, more), (0, width - problem.block_tables.shape[1]))),
        seq_lens=np.pad(problem.seq_lens, (0, more)),
        cu_q_lens=np.pad(problem.cu_q_lens, (0, more), mode="edge"),
    )


def _more_blocks(cache: np.ndarray, blocks: int) -> np.ndarray:
    extra = np.full((blocks - len(cache), *cache.shape[1:]), np.nan, np.float32)
    return np.concatenate([cache, extra])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "block_size"), [(1, 1, 8), (2, 3, 16), (3, 4, 32), (1, 7, 8), (2, 8, 16)]
)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 31, 32, 33, 70])), min_size=1, max_size=11
    ),
)
def test_matches_reference(backend, kv_heads, group, block_size, seed, lengths) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16,
        block_size=block_size,
    )
    out = run(padded_to(problem, tokens=11 * 70 + 6, seqs=12, width=30, blocks=11 * 28 + 4), backend)
    assert np.isfinite(out).all(), "padding rows must be finite as well"
    real = problem.cu_q_lens[problem.num_seqs]
    np.testing.assert_allclose(out[:real], expected(problem)[:real], atol=4e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [0, 127, 128, 129, 255, 256, 1000])
def test_bfloat16_and_window_edges(backend: str, context: int) -> None:
    rng = np.random.default_rng(context)
    problem = make_problem(
        rng, contexts=[context, 5], query_lens=[1, 40], heads=9, kv_heads=3, head_dim=64, block_size=32
    )
    rounded = dataclasses.replace(
        problem,
        **{
            name: np.asarray(jnp.asarray(getattr(problem, name), jnp.bfloat16), np.float32)
            for name in ("q", "k_cache", "v_cache")
        },
    )
    out = run(rounded, backend, jnp.bfloat16)
    truth = expected(rounded)
    assert np.abs(out - truth).max() <= 1e-2 * np.abs(truth).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_len", [1, 37])
def test_a_row_does_not_depend_on_its_batch_mates(backend: str, query_len: int) -> None:
    """Bit for bit: alone, last of many, in other paddings."""
    rng = np.random.default_rng(7)
    alone = make_problem(
        rng,
        contexts=[333],
        query_lens=[query_len],
        heads=9,
        kv_heads=3,
        head_dim=64,
        block_size=32,
        pad_tokens=3,
    )
    mates = make_problem(
        rng,
        contexts=[600, 1, 90, 411],
        query_lens=[1, 1, 1, 50],
        heads=9,
        kv_heads=3,
        head_dim=64,
        block_size=32,
    )
    offset = mates.k_cache.shape[0]
    # The same sequence appended to a batch of others, its blocks moved behind theirs.
    width = max(mates.block_tables.shape[1], alone.block_tables.shape[1]) + 2
    widen = lambda tables: np.pad(tables, ((0, 0), (0, width - tables.shape[1])))  # noqa: E731
    position = mates.num_decodes if query_len == 1 else mates.num_seqs
    row = int(mates.cu_q_lens[position])
    moved = widen(alone.block_tables)
    moved[:, : -(-int(alone.seq_lens[0]) // 32)] += offset
    together = Problem(
        q=np.insert(mates.q, [row] * query_len, alone.q[:query_len], axis=0),
        k_cache=np.concatenate([mates.k_cache, alone.k_cache]),
        v_cache=np.concatenate([mates.v_cache, alone.v_cache]),
        block_tables=np.insert(widen(mates.block_tables), position, moved[0], axis=0),
        seq_lens=np.insert(mates.seq_lens, position, alone.seq_lens[0]),
        cu_q_lens=np.concatenate(
            [mates.cu_q_lens[: position + 1], mates.cu_q_lens[position:] + query_len]
        ).astype(np.int32),
        num_decodes=mates.num_decodes + (query_len == 1),
        num_seqs=mates.num_seqs + 1,
        scale=alone.scale,
    )
    np.testing.assert_array_equal(
        run(alone, backend)[:query_len], run(together, backend)[row : row + query_len]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_is_the_ragged_case_of_single_rows(backend: str) -> None:
    problem = make_problem(
        np.random.default_rng(3),
        contexts=[0, 7, 8, 300, 31],
        query_lens=[1] * 5,
        heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=8,
        pad_seqs=3,
    )
    q = np.pad(problem.q, ((0, 3), (0, 0), (0, 0)))
    out = paged_decode(
        jnp.asarray(q),
        jnp.asarray(problem.k_cache),
        jnp.asarray(problem.v_cache),
        block_tables_SB=jnp.asarray(problem.block_tables),
        seq_lens_S=jnp.asarray(problem.seq_lens),
        num_seqs=jnp.int32(5),
        scale=problem.scale,
        backend=backend,
    )
    np.testing.assert_allclose(out[:5], expected(problem), atol=3e-6, rtol=0)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'cuda'.*xla"):
        resolve_backend("cuda", platform="cpu")
    cache = jnp.zeros((4, 2, 8, 16))
    arguments = {
        "block_tables_SB": jnp.zeros((1, 1), jnp.int32),
        "seq_lens_S": jnp.ones(1, jnp.int32),
        "num_seqs": jnp.int32(1),
        "scale": 1.0,
        "backend": "xla",
    }
    with pytest.raises(ValueError, match="does not match a cache of 2 heads of 16"):
        paged_decode(jnp.zeros((1, 3, 16)), cache, cache, **arguments)
    with pytest.raises(ValueError, match="share a float dtype"):
        paged_decode(jnp.zeros((1, 2, 16), jnp.bfloat16), cache, cache, **arguments)
