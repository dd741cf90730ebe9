"""Paged attention with Pallas' Triton backend, for NVIDIA GPUs from Ampere on.

JAX deprecates that backend: nothing outside the `pallas_triton*` files may depend on it.

Decode rows: one program for each (sequence, KV head, split of the context), cut by `split_k`; then one for each
(sequence, query head), which combines the splits' results.
Prefill chunks: one program for each (tile of query tokens, KV head), written into the memory in which the decoded rows
already stand. All three are always launched, since which rows decode is data; a program that has nothing to do exits
at once. The caches are only read, never copied.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.backends import Backend
from pallas_kernels.paged_attention.pallas_triton_kernels import (
    TileShape,
    combine_kernel,
    decode_kernel,
    padded,
    prefill_kernel,
)
from pallas_kernels.paged_attention.prefill_tiles import PrefillTiles, cut_chunks
from pallas_kernels.paged_attention.spec import AttentionSpec, DeviceFacts
from pallas_kernels.paged_attention.split_k import cut_rows
from pallas_kernels.paged_attention.tuning import TuningConfig

_DTYPES = ("bfloat16", "float16", "float32")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_MOST_HEAD_DIM = 256
_MOST_GROUP = 64
_COMBINE_WARPS = 4


def check(spec: AttentionSpec, device: DeviceFacts, *, interpret: bool) -> None:
    """Whether this backend runs such calls on such a device; interpreted, on any.

    Raises:
      NotImplementedError: it does not; the text says what it supports.
    """
    if spec.dtype not in _DTYPES or spec.kv_dtype not in (spec.dtype, *_QUANTISED):
        raise NotImplementedError(
            f"pallas-triton supports queries of {', '.join(_DTYPES)} over a cache of the same dtype or of "
            f"{', '.join(_QUANTISED)}; not {spec.dtype} over {spec.kv_dtype}"
        )
    if spec.head_dim % 8 or not 0 < spec.head_dim <= _MOST_HEAD_DIM:
        raise NotImplementedError(
            f"pallas-triton supports a head_dim that is a multiple of 8 up to {_MOST_HEAD_DIM}, not {spec.head_dim}"
        )
    if spec.group > _MOST_GROUP:
        raise NotImplementedError(
            f"pallas-triton supports up to {_MOST_GROUP} query heads for each KV head, not {spec.group}"
        )
    if interpret:
        return
    capability = device.compute_capability or (0, 0)
    if capability < (8, 0):
        raise NotImplementedError(
            f"pallas-triton needs compute capability 8.0 (Ampere) or later, this device has {capability}"
        )
    if spec.kv_dtype == "float8_e4m3fn" and capability < (8, 9):
        raise NotImplementedError(
            f"pallas-triton reads float8_e4m3fn caches from compute capability 8.9 on, this device has {capability}; "
            f"int8 and float8_e5m2 work"
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
    """See `api.ragged_paged_attention`. Padding rows are 0."""
    num_tokens = q_THd.shape[0]
    num_rows = min(num_tokens, block_tables_SB.shape[0])
    tuning = _tuning(backend)
    context = _context(block_tables_SB, k_cache_NKbd, v_cache_NKbd, k_scale, v_scale)
    decode_shape = _decode_shape(q_THd, k_cache_NKbd, scale, sliding_window, soft_cap, backend)
    onto = jnp.zeros_like(q_THd) if num_tokens > num_rows else None
    out_THd = _decode(q_THd, context, seq_lens_S[:num_rows], num_decodes, decode_shape, backend, onto)
    shape = dataclasses.replace(
        decode_shape,
        matrix_rows=max(decode_shape.matrix_rows, padded(tuning.prefill_block_q)),
        block_k=tuning.prefill_block_k,
    )
    tiles = cut_chunks(
        num_tokens=num_tokens,
        rows=shape.matrix_rows // shape.group,
        seq_lens_S=seq_lens_S,
        cu_q_lens=cu_q_lens,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
    )
    return _prefill(q_THd, context, tiles, shape, backend, out_THd)


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
    shape = _decode_shape(q_SHd, k_cache_NKbd, scale, sliding_window, soft_cap, backend)
    context = _context(block_tables_SB, k_cache_NKbd, v_cache_NKbd, k_scale, v_scale)
    return _decode(q_SHd, context, seq_lens_S, num_seqs, shape, backend, None)


def _decode(
    q_THd: jax.Array,
    context: tuple[jax.Array, ...],
    seq_lens_S: jax.Array,
    num_decodes: jax.Array,
    shape: TileShape,
    backend: Backend,
    onto_THd: jax.Array | None,
) -> jax.Array:
    """[T, H, d]: the first S rows attended, 0 from `num_decodes` on; the rows after S as in `onto_THd` (consumed).

    Args:
      context: see `_context`.
    """
    num_heads, head_dim = q_THd.shape[1:]
    num_rows = seq_lens_S.shape[0]
    tuning = _tuning(backend)
    lens_S = jnp.where(lax.iota(jnp.int32, num_rows) < num_decodes, seq_lens_S, 0)
    splits = cut_rows(
        lens_S,
        block_k=shape.block_k,
        split_tokens=tuning.split_tokens,
        max_splits=backend.max_splits,
        sliding_window=shape.sliding_window,
    )
    per_head = (backend.max_splits, num_rows, num_heads)
    partial, peak, total = pl.pallas_call(
        functools.partial(decode_kernel, shape=shape),
        out_shape=[
            jax.ShapeDtypeStruct((*per_head, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(per_head, jnp.float32),
            jax.ShapeDtypeStruct(per_head, jnp.float32),
        ],
        grid=(num_rows, num_heads // shape.group, backend.max_splits),
        compiler_params=plt.CompilerParams(num_warps=tuning.decode_warps, num_stages=tuning.decode_stages),
        interpret=backend.interpret,
        name="paged_decode",
    )(splits.first_tile, splits.end_tile, splits.tiles_per_split, lens_S, q_THd, *context)
    operands = (splits.num_splits, partial, peak, total)
    return pl.pallas_call(
        functools.partial(combine_kernel, padded_dim=shape.padded_dim),
        out_shape=jax.ShapeDtypeStruct(q_THd.shape, q_THd.dtype),
        grid=(num_rows, num_heads),
        input_output_aliases={} if onto_THd is None else {len(operands): 0},
        compiler_params=plt.CompilerParams(num_warps=_COMBINE_WARPS, num_stages=1),
        interpret=backend.interpret,
        name="combine_splits",
    )(*operands, *([] if onto_THd is None else [onto_THd]))


def _prefill(
    q_THd: jax.Array,
    context: tuple[jax.Array, ...],
    tiles: PrefillTiles,
    shape: TileShape,
    backend: Backend,
    onto_THd: jax.Array,
) -> jax.Array:
    """`onto_THd` (consumed) with the rows of every prefill chunk filled in."""
    tuning = _tuning(backend)
    facts = (tiles.owner_M, tiles.start_M, tiles.position_M, tiles.rows_M)
    operands = (*facts, q_THd, *context, onto_THd)
    return pl.pallas_call(
        functools.partial(prefill_kernel, shape=shape),
        out_shape=jax.ShapeDtypeStruct(onto_THd.shape, onto_THd.dtype),
        grid=(tiles.owner_M.shape[0], q_THd.shape[1] // shape.group),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plt.CompilerParams(num_warps=tuning.prefill_warps, num_stages=tuning.prefill_stages),
        interpret=backend.interpret,
        name="paged_prefill",
    )(*operands)


def _decode_shape(
    q: jax.Array,
    k_cache_NKbd: jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    backend: Backend,
) -> TileShape:
    """What a decode program works on: the query heads of one KV head."""
    group = q.shape[1] // k_cache_NKbd.shape[1]
    return TileShape(
        group=group,
        matrix_rows=padded(group),
        head_dim=q.shape[2],
        block_size=k_cache_NKbd.shape[2],
        block_k=_tuning(backend).decode_block_k,
        value_dtype=_value_dtype(q, k_cache_NKbd),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def _context(
    block_tables_SB: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """The operands that `Context.from_refs` takes."""
    if k_cache_NKbd.dtype.itemsize == 1 and 2**31 < k_cache_NKbd.size <= 2**32:
        # JAX computes offsets in 32 bits up to 2**32 bytes, signed: wrong past 2**31 numbers of one byte.
        raise NotImplementedError(
            f"pallas-triton can't address a cache of 2 to 4 GiB in one-byte numbers, got {k_cache_NKbd.shape}; "
            f"use a smaller cache, or a larger one"
        )
    if k_scale is None or v_scale is None:
        return block_tables_SB, k_cache_NKbd, v_cache_NKbd
    return block_tables_SB, k_cache_NKbd, v_cache_NKbd, k_scale, v_scale


def _value_dtype(q: jax.Array, cache: jax.Array) -> str:
    """What weights and values are multiplied in. A quantised cache's weights carry its scales, whose small products
    float16 can't hold; bfloat16 can, and holds every int8 and fp8 number exactly."""
    if q.dtype == cache.dtype or q.dtype == jnp.float32:
        return str(q.dtype)
    return "bfloat16"


def _tuning(backend: Backend) -> TuningConfig:
    if backend.tuning is None:
        raise ValueError("pallas-triton needs tile sizes: take the backend from resolve_backend")
    return backend.tuning
