"""The problems of `pallas_kernels.paged_attention.cases`, by the name that tests know, and variants of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_kernels.paged_attention.cases import (
    Problem,
    appended_to,
    backend_for,
    expected,
    in_dtype,
    make_problem,
    padded_to,
    quantised,
    run,
    run_decode,
)

__all__ = [
    "Problem",
    "appended_to",
    "backend_for",
    "decoded",
    "expected",
    "in_dtype",
    "last_chunk",
    "make_problem",
    "padded_to",
    "products",
    "quantised",
    "run",
    "run_decode",
]


def decoded(problem: Problem, count: int) -> Problem:
    """The last rows of a problem of one sequence, each as a sequence of its own over the same blocks."""
    length = problem.seq_lens[0]
    return dataclasses.replace(
        problem,
        q=problem.q[-count:],
        block_tables=np.repeat(problem.block_tables, count, axis=0),
        seq_lens=np.arange(length - count + 1, length + 1, dtype=np.int32),
        cu_q_lens=np.arange(count + 1, dtype=np.int32),
        num_decodes=count,
        num_seqs=count,
    )


def products(jaxpr: Any) -> Iterator[Any]:
    """Every matrix product of a traced function, those of loops and kernels in it as well."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # of a closed one
                if hasattr(inner, "eqns"):
                    yield from products(inner)


def last_chunk(problem: Problem, count: int) -> Problem:
    """The last rows of a problem of one sequence as a chunk."""
    return dataclasses.replace(problem, q=problem.q[-count:], cu_q_lens=np.array([0, count], np.int32))
