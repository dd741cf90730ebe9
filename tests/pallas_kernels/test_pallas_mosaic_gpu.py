"""The Mosaic GPU backend: interpreted against the float64 reference, searched for races, lowered for CUDA without CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import (
    H200,
    AttentionSpec,
    Backend,
    paged_decode,
    ragged_paged_attention,
    resolve_backend,
)
from pallas_kernels.paged_attention.spec import DeviceFacts
from tests.pallas_kernels.problems import (
    Problem,
    appended_to,
    backend_for,
    expected,
    in_dtype,
    make_problem,
    padded_to,
    run,
    run_decode,
)

NAME = "pallas-mosaic-gpu"
INTERPRETED = f"{NAME}-interpret"


def _backend(problem: Problem, *, splits: int = 3, **tuning: int) -> Backend:
    """The interpreted backend with short splits, so that small problems have several."""
    backend = backend_for(INTERPRETED, problem)
    assert backend.tuning is not None
    tuning = {"split_tokens": 64, "decode_block_k": 64, "prefill_block_k": 64, **tuning}
    return dataclasses.replace(
        backend, tuning=dataclasses.replace(backend.tuning, **tuning), max_splits=splits
    )


def _assert_close(out: np.ndarray, problem: Problem) -> None:
    truth = expected(problem)
    real = problem.cu_q_lens[problem.num_seqs]
    assert np.isfinite(out).all(), "padding rows must be finite as well"
    assert np.abs(out[:real] - truth[:real]).max() <= 1e-2 * np.abs(truth).max()


def _mixed(rng: np.random.Generator, *, dtype: str = "bfloat16", **shape: int) -> Problem:
    """Two decode rows and two chunks that fill no tile exactly, in a padded batch."""
    problem = make_problem(
        rng, contexts=[200, 6, 70, 0], query_lens=[1, 1, 25, 67], pad_tokens=3, pad_seqs=1, **shape
    )
    return in_dtype(problem, dtype)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "dtype"),
    [
        (2, 1, 64, 16, "bfloat16"),
        (1, 3, 64, 8, "float16"),
        (2, 4, 128, 32, "bfloat16"),
        (1, 7, 64, 128, "bfloat16"),
        (1, 8, 256, 64, "bfloat16"),
        (1, 16, 64, 32, "float16"),
    ],
)
def test_matches_reference(kv_heads: int, group: int, head_dim: int, block_size: int, dtype: str) -> None:
    problem = _mixed(
        np.random.default_rng(group),
        dtype=dtype,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    _assert_close(run(problem, _backend(problem)), problem)
