"""Cases that time our attention: decode in bytes a second, prefill in operations a second."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.paged_attention import XLA, Backend, resolve_backend
from scripts.gpu.attention_load import (
    Load,
    Pool,
    decode_load,
    pool_for,
    prefill_load,
    run_decode,
    run_prefill,
    spec_of,
)
from scripts.gpu.correctness import LIMITS, this_device
from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.measure import median_seconds
from scripts.gpu.workplace import Workplace


def time_decode(case: Case, place: Workplace) -> dict[str, Any]:
    """`batch` rows of `context` tokens each. With `compare`, the result is held against our XLA attention's first."""
    backend, pool, load = prepare(case, place, launches=case["launches"])
    if case.get("compare"):
        _compare(run_decode, load, pool, backend)
    taken = median_seconds(
        lambda: run_decode(load, pool, backend), jax.block_until_ready, launches=len(load.tables_LSB)
    )
    return {**taken, "bytes": load.bytes_read, "bytes_per_s": load.bytes_read / taken["seconds"]}


def time_prefill(case: Case, place: Workplace) -> dict[str, Any]:
    """`tokens` query rows in chunks of `chunk`, each behind `context` tokens."""
    backend, pool, load = prepare(case, place, launches=case["launches"])
    if case.get("compare"):
        _compare(run_prefill, load, pool, backend)
    taken = median_seconds(
        lambda: run_prefill(load, pool, backend), jax.block_until_ready, launches=len(load.tables_LSB)
    )
    return {**taken, "flops": load.flops, "flops_per_s": load.flops / taken["seconds"]}


def compare_in_large_cache(case: Case, place: Workplace) -> dict[str, Any]:
    """Decoding from blocks all over a cache of `pool_tokens`, against our XLA attention."""
    backend, pool, load = prepare(case, place, launches=case["launches"])
    return {"error": _compare(run_decode, load, pool, backend), "limit": 2 * LIMITS[case["dtype"]]}


def prepare(case: Case, place: Workplace, *, launches: int) -> tuple[Backend, Pool, Load]:
    """What a decode or prefill case runs on.

    Raises:
      NotImplementedError: the backend refuses such a call.
    """
    spec = spec_of(case)
    backend = resolve_backend(place.backend_name(case["backend"]), spec=spec, device=this_device())
    pool = pool_for(case, place)
    if "chunk" in case:
        load = prefill_load(
            spec,
            pool,
            case["chunk"],
            case["context"],
            tokens=case["tokens"],
            rows=case["rows"],
            width=case["width"],
            launches=launches,
        )
    else:
        lens = [case["context"]] * case["batch"]
        rows = case.get("rows", len(lens))
        load = decode_load(spec, pool, lens, rows=rows, width=case["width"], launches=launches)
    return backend, pool, load


def _compare(run: Any, load: Load, pool: Pool, backend: Backend) -> float:
    """Long contexts and large batches are too much for the float64 reference; our XLA attention stands in."""
    ours, theirs = (np.asarray(run(load, pool, b), np.float32) for b in (backend, XLA))
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error <= 2 * LIMITS[str(load.q.dtype)]:
        raise CheckFailedError(
            f"differs from our XLA attention by {error:.2e}, relative to its largest value"
        )
    return error
