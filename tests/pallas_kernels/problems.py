"""The problems of `pallas_kernels.paged_attention.cases`, by the name that tests know them under."""

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
    "expected",
    "in_dtype",
    "make_problem",
    "padded_to",
    "quantised",
    "run",
    "run_decode",
]
