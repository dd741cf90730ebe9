"""Cases that compare a backend on this device with the float64 reference."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np

from pallas_kernels.paged_attention import Backend, DeviceFacts, facts_of
from pallas_kernels.paged_attention.cases import (
    Problem,
    appended_to,
    backend_for,
    expected,
    in_dtype,
    make_problem,
    quantised,
    run,
    run_decode,
)
from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.workplace import Workplace

# Largest error, relative to the reference's largest value.
LIMITS = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
_RUNS = 3  # results that differ between runs mean a race


def attention(case: Case, place: Workplace) -> dict[str, Any]:
    """`ragged_paged_attention`: right, finite in the padding, and the same every time."""
    problem = build_problem(case)
    outputs = [run(problem, backend_of(case, problem, place)) for _ in range(1 if place.cpu else _RUNS)]
    if not np.isfinite(outputs[0]).all():
        raise CheckFailedError("NaN or infinity in the output")
    real = problem.cu_q_lens[problem.num_seqs]
    return _judge([out[:real] for out in outputs], expected(problem)[:real], problem.dtype)


def decode(case: Case, place: Workplace) -> dict[str, Any]:
    """`paged_decode`: right, 0 in rows that are not real, and the same every time."""
    problem = build_problem(case)
    outputs = [
        run_decode(problem, backend_of(case, problem, place)) for _ in range(1 if place.cpu else _RUNS)
    ]
    if outputs[0][problem.num_seqs :].any():
        raise CheckFailedError("rows past num_seqs are not 0")
    real = problem.num_seqs
    return _judge([out[:real] for out in outputs], expected(problem)[:real], problem.dtype)


def alone_and_in_company(case: Case, place: Workplace) -> dict[str, Any]:
    """A sequence's rows have the same bits alone and in a larger batch; `contexts[0]` and `query_lens[0]` are its."""
    rng = _random(case)
    contexts, query_lens = list(case["contexts"]), list(case["query_lens"])
    count = query_lens[0]
    pick = lambda part: build_problem({**case, **part}, rng)  # noqa: E731
    alone = pick({"contexts": contexts[:1], "query_lens": query_lens[:1], "padding": 3})
    mates = pick({"contexts": contexts[1:], "query_lens": query_lens[1:], "padding": 0})
    together, row = appended_to(mates, alone)
    backend = backend_of(case, alone, place)
    left, right = run(alone, backend)[:count], run(together, backend)[row : row + count]
    if not np.array_equal(left, right):
        raise CheckFailedError(f"bits differ: {np.abs(left - right).max():.2e} at most")
    return _judge([left], expected(alone)[:count], alone.dtype)


def build_problem(case: Case, rng: np.random.Generator | None = None) -> Problem:
    """The problem a case describes; equal cases give equal problems."""
    rng = rng or _random(case)
    padding = case.get("padding", 0)
    problem = make_problem(
        rng,
        contexts=list(case["contexts"]),
        query_lens=list(case["query_lens"]),
        heads=case["kv_heads"] * case["group"],
        kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        pad_tokens=padding,
        pad_seqs=padding,
        pad_blocks=padding,
    )
    kv_dtype = case.get("kv_dtype", case["dtype"])
    if kv_dtype != case["dtype"]:
        problem = quantised(problem, kv_dtype, rng, per=case["scales"])
        rounded = in_dtype(problem, case["dtype"])  # the queries; the cache is as `quantised` left it
        problem = dataclasses.replace(problem, q=rounded.q, dtype=case["dtype"])
    else:
        problem = in_dtype(problem, kv_dtype)
    return dataclasses.replace(problem, sliding_window=case.get("window"), soft_cap=case.get("cap"))


def backend_of(case: Case, problem: Problem, place: Workplace) -> Backend:
    """The case's backend on the device that is here, with the case's own tile sizes if it has any.

    Raises:
      NotImplementedError: it does not support the problem.
    """
    return backend_for(place.backend_name(case["backend"]), problem, this_device())


def this_device() -> DeviceFacts:
    return facts_of(jax.local_devices()[0])


def check_outputs(outputs: list[np.ndarray], truth: np.ndarray, dtype: str) -> float:
    """The error relative to the reference's largest value.

    Raises:
      CheckFailedError: it is too large, or the outputs of equal runs differ.
    """
    for other in outputs[1:]:
        if not np.array_equal(outputs[0], other):
            raise CheckFailedError("two runs of one program gave different bits: a race")
    error = float(np.abs(outputs[0] - truth).max() / np.abs(truth).max())
    if not error <= LIMITS[dtype]:
        raise CheckFailedError(f"relative error {error:.2e}, allowed {LIMITS[dtype]:.0e}")
    return error


def _judge(outputs: list[np.ndarray], truth: np.ndarray, dtype: str) -> dict[str, Any]:
    return {"error": check_outputs(outputs, truth, dtype), "limit": LIMITS[dtype]}


def _random(case: Case) -> np.random.Generator:
    """By what the problem is, not by who solves it: every backend gets the same numbers."""
    shape = {key: value for key, value in case.items() if key not in ("name", "backend", "tuning")}
    return np.random.default_rng(zlib.crc32(repr(sorted(shape.items())).encode()))
