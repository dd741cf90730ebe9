"""What the tests of the Mosaic GPU backend share: its problems, and a process to interpret it in."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import (
    H200,
    AttentionSpec,
    Backend,
    mosaic_gpu_tiles,
    ragged_paged_attention,
    resolve_backend,
)
from tests.pallas_kernels.problems import Problem, backend_for, expected, make_problem, run, run_decode

INTERPRETED = "pallas-mosaic-gpu-interpret"
MAX_SPLITS = 3
NUM_BLOCKS = 1000
SEARCH_RACES = plgpu.InterpretGPUParams(detect_races=True)


def interpreted(problem: Problem, *, max_splits: int = MAX_SPLITS) -> Backend:
    """The backend with tiles and splits so small that a test's contexts have several, and memory for so few that it is
    used again."""
    backend = backend_for(INTERPRETED, problem)
    assert backend.tuning is not None
    tuning = backend.tuning
    tuning = dataclasses.replace(
        tuning,
        split_tokens=64,
        decode_stages=2,
        prefill_stages=2,
        decode_block_k=min(64, tuning.decode_block_k),
        prefill_block_k=min(64, tuning.prefill_block_k),
    )
    return dataclasses.replace(backend, tuning=tuning, max_splits=max_splits)


def mixed_batch(
    *,
    group: int,
    block_size: int,
    head_dim: int,
    kv_heads: int = 1,
    contexts: tuple[int, ...] = (330, 6, 63, 130, 0),
    **features,
) -> Problem:
    """Decode rows of several splits and of one, and chunks that fill no tile; the padding queries are NaN."""
    problem = make_problem(
        np.random.default_rng(group),
        contexts=list(contexts),
        query_lens=[1, 1, 1, 25, 67],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        pad_tokens=3,
        pad_seqs=1,
        pad_blocks=1,
    )
    problem.q[-3:] = np.nan
    return dataclasses.replace(problem, **features)


def assert_matches(problem: Problem, out: np.ndarray) -> None:
    """The rows of a batch against the float64 reference."""
    real = problem.cu_q_lens[problem.num_seqs]
    assert not out[real:].any(), "padding rows are 0"
    truth = expected(problem)
    assert np.abs(out[:real] - truth[:real]).max() <= 1e-2 * np.abs(truth).max()


def found_races() -> bool:
    """Whether the kernel that ran last had any: the interpreter prints them, and raises nothing."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


@contextmanager
def exact_products() -> Iterator[None]:
    """The interpreter multiplies with BLAS, where a row's float32 sum depends on its place in the matrix; a wgmma's
    does not."""
    matmul = np.matmul

    def exact(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    np.matmul = exact  # type: ignore[assignment]
    try:
        yield
    finally:
        np.matmul = matmul


def run_exactly(problem: Problem, backend: Backend) -> np.ndarray:
    """`run`, where a row's products don't depend on its place."""
    with exact_products():
        return run(problem, backend)


def search_races(problem: Problem, backend: Backend, *, only_decode: bool) -> tuple[np.ndarray, bool]:
    """(result, whether a race was found). No other call may have had this backend: jit's cache would serve it."""
    before = mosaic_gpu_tiles.INTERPRET_PARAMS
    mosaic_gpu_tiles.INTERPRET_PARAMS = SEARCH_RACES
    try:
        out = run_decode(problem, backend) if only_decode else run(problem, backend)
    finally:
        mosaic_gpu_tiles.INTERPRET_PARAMS = before
    return out, found_races()


@contextmanager
def interpreter_process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: the interpreter gives each warpgroup a thread, and one that waits at a barrier holds one of
    XLA's too, of which there are as many as cores. With two, four warpgroups can wait for each other for ever."""
    before = os.environ.get("PJRT_NPROC")
    os.environ["PJRT_NPROC"] = "5"  # a process reads it when it makes its first array
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.getpid).result()
            yield pool
    finally:
        if before is None:
            del os.environ["PJRT_NPROC"]
        else:
            os.environ["PJRT_NPROC"] = before


def assert_lowers_for_an_h200(
    spec: AttentionSpec, *, scales: Mapping[str, jax.ShapeDtypeStruct] | None = None, **features: Any
) -> None:
    """Of a call over a cache of NUM_BLOCKS blocks."""
    backend = resolve_backend("pallas-mosaic-gpu", spec=spec, device=H200)
    array = jax.ShapeDtypeStruct
    cache = array((NUM_BLOCKS, spec.num_kv_heads, spec.block_size, spec.head_dim), spec.kv_dtype)

    def call(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, **arguments: Any) -> jax.Array:
        return ragged_paged_attention(
            q, k_cache, v_cache, scale=0.1, backend=backend, **arguments, **features
        )

    traced = jax.jit(call).trace(
        array((64, spec.num_heads, spec.head_dim), spec.dtype),
        cache,
        cache,
        block_tables_SB=array((8, 33), "int32"),
        seq_lens_S=array((8,), "int32"),
        cu_q_lens=array((9,), "int32"),
        num_decodes=array((), "int32"),
        num_seqs=array((), "int32"),
        **(scales or {}),
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3, "decode, the sum of its splits, prefill"
