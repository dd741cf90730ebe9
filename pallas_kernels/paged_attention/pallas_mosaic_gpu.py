"""Paged attention for Hopper (Pallas on Mosaic GPU): TMA, wgmma, warp specialisation.

Decode rows and prefill chunks run in one kernel each, `mosaic_gpu_decode` and `mosaic_gpu_prefill`. Both are launched
for every ragged batch; one that has nothing to do ends at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.backends import Backend
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_rows
from pallas_kernels.paged_attention.mosaic_gpu_prefill import prefill_tiles, tokens_per_tile
from pallas_kernels.paged_attention.mosaic_gpu_tiles import ROWS, PagedCache, TileMath
from pallas_kernels.paged_attention.prefill_tiles import cut_chunks
from pallas_kernels.paged_attention.spec import AttentionSpec, DeviceFacts
from pallas_kernels.paged_attention.tuning import TuningConfig

_HEAD_DIMS = (64, 96, 128, 256)
_MOST_HEAD_DIM_QUANTISED = 128
_BLOCK_SIZES = (8, 16, 32, 64, 128)
_DTYPES = ("bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def check(spec: AttentionSpec, device: DeviceFacts, *, interpret: bool) -> None:
    """Refuse what the kernels can't run.

    Raises:
      NotImplementedError: with what they can.
    """
    if not interpret and device.compute_capability != (9, 0):
        # wgmma is Hopper's alone; Blackwell has tcgen05 in its place.
        raise NotImplementedError(
            f"pallas-mosaic-gpu is for compute capability 9.0, this device has {device.compute_capability}"
        )
    if spec.dtype not in _DTYPES or spec.kv_dtype not in (spec.dtype, *_QUANTISED):
        raise NotImplementedError(
            f"pallas-mosaic-gpu supports queries of {' or '.join(_DTYPES)} over a cache of the same dtype or of "
            f"{', '.join(_QUANTISED)}; not {spec.dtype} over {spec.kv_dtype}"
        )
    if spec.head_dim not in _HEAD_DIMS:
        raise NotImplementedError(
            f"pallas-mosaic-gpu supports head_dim {', '.join(map(str, _HEAD_DIMS))}, not {spec.head_dim}"
        )
    if spec.is_quantised and spec.head_dim > _MOST_HEAD_DIM_QUANTISED:
        # Threads that compute prefill need more registers than those that widen numbers beside them leave.
        raise NotImplementedError(
            f"pallas-mosaic-gpu supports caches of {', '.join(_QUANTISED)} up to head_dim {_MOST_HEAD_DIM_QUANTISED}, "
            f"not {spec.head_dim}"
        )
    if spec.block_size not in _BLOCK_SIZES:
        raise NotImplementedError(
            f"pallas-mosaic-gpu supports block sizes {', '.join(map(str, _BLOCK_SIZES))}, not {spec.block_size}"
        )
    if spec.group > ROWS:
        raise NotImplementedError(
            f"pallas-mosaic-gpu supports up to {ROWS} query heads a KV head, not {spec.group}"
        )


def ragged_paged_attention(
    q_THd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    block_tables_SB: jax.Array,
    seq_lens_S: jax.Array,
    cu_q_lens: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    backend: Backend,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """See `api.ragged_paged_attention`."""
    num_tokens, num_heads, _ = q_THd.shape
    num_rows = min(num_tokens, seq_lens_S.shape[0])
    cache = PagedCache(k_cache_NKbd, v_cache_NKbd, k_scale, v_scale, block_tables_SB)
    group = num_heads // k_cache_NKbd.shape[1]
    decodes = lax.iota(jnp.int32, num_rows) < num_decodes
    features: dict[str, Any] = {
        "scale": scale,
        "backend": backend,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
    }
    decoded = _decode(
        q_THd[:num_rows],
        dataclasses.replace(cache, tables_SB=block_tables_SB[:num_rows]),
        jnp.where(decodes, seq_lens_S[:num_rows], 0),
        **features,
    )
    tiles = cut_chunks(
        num_tokens=num_tokens,
        rows=tokens_per_tile(group),
        seq_lens_S=seq_lens_S,
        cu_q_lens=cu_q_lens,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
    )
    tuning = _tuning(backend)
    prefilled, inside_T = prefill_tiles(
        q_THd,
        cache,
        seq_lens_S,
        tiles,
        stages=tuning.prefill_stages,
        math_=_math(q_THd, cache, tuning.prefill_block_k, **features),
    )
    decoded = jnp.pad(decoded, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(inside_T[:, None, None], prefilled, decoded)


def paged_decode(
    q_SHd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    block_tables_SB: jax.Array,
    seq_lens_S: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    backend: Backend,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """See `api.paged_decode`."""
    real = lax.iota(jnp.int32, q_SHd.shape[0]) < num_seqs
    return _decode(
        q_SHd,
        PagedCache(k_cache_NKbd, v_cache_NKbd, k_scale, v_scale, block_tables_SB),
        jnp.where(real, seq_lens_S, 0),
        scale=scale,
        backend=backend,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def _decode(
    q_SHd: jax.Array,
    cache: PagedCache,
    seq_lens_S: jax.Array,
    *,
    backend: Backend,
    **features: Any,
) -> jax.Array:
    """dtype of q [S, H, d]; 0 for rows of length 0."""
    tuning = _tuning(backend)
    out = decode_rows(
        q_SHd,
        cache,
        seq_lens_S,
        stages=tuning.decode_stages,
        split_tokens=tuning.split_tokens,
        max_splits=backend.max_splits,
        math_=_math(q_SHd, cache, tuning.decode_block_k, backend=backend, **features),
    )
    return out.astype(q_SHd.dtype)


def _math(
    q: jax.Array,
    cache: PagedCache,
    block_k: int,
    *,
    scale: float,
    backend: Backend,
    sliding_window: int | None,
    soft_cap: float | None,
) -> TileMath:
    return TileMath(
        head_dim=q.shape[2],
        block_k=block_k,
        block_size=cache.k_NKbd.shape[2],
        dtype=str(q.dtype),
        kv_dtype=str(cache.k_NKbd.dtype),
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        interpret=backend.interpret,
    )


def _tuning(backend: Backend) -> TuningConfig:
    if backend.tuning is None:
        raise ValueError("the backend has no tile sizes; get it from resolve_backend")
    return backend.tuning
