"""The bodies of the Pallas Triton kernels: what one program of the grid does. See `pallas_triton` for the calls.

A program attends a small matrix of M query rows that share a KV head over its context, one tile of keys and values at
a time, with an online softmax. Shape letters: as in `api`, and M matrix rows (query tokens x group,
padded), D head size padded to a power of two, k context tokens of a tile.

Source: FlashAttention-2 (arXiv 2307.08691); Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_LOG2_E = math.log2(math.e)
_NO_PEAK = -1e30  # finite: a row that sees nothing yet decays by exp2(0) = 1, not by exp2(-inf + inf)

type Ref = Any  # a Pallas reference
type State = tuple[jax.Array, jax.Array, jax.Array]
"""Of an online softmax, float32: weighted sum of values [M, D], largest score [M] (yet without `TileShape.log2_units`),
sum of weights [M]."""


@dataclass(frozen=True)
class TileShape:
    """The static side of a program.

    Attributes:
      group: query heads that share a KV head.
      matrix_rows: M, room for `group` rows of each query token; a power of two from 16, as matrix units want it.
      head_dim, block_size: d and b.
      block_k: context tokens of a tile; a power of two from 16.
      value_dtype: what weights and values are multiplied in.
      scale, sliding_window, soft_cap: as in `api.ragged_paged_attention`.
    """

    group: int
    matrix_rows: int
    head_dim: int
    block_size: int
    block_k: int
    value_dtype: str
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    @property
    def padded_dim(self) -> int:
        """D"""
        return padded(self.head_dim)

    @property
    def log2_units(self) -> float:
        """What scores, as `State` has them, are multiplied with to be exponents of 2. Positive, so that the largest
        score stays that."""
        if self.soft_cap is not None:
            return self.soft_cap * _LOG2_E
        return (self.scale if self.scale > 0 else 1.0) * _LOG2_E


@dataclass(frozen=True)
class Context:
    """What every tile reads: references to the caches, their scales (a quantised cache's) and the block tables."""

    k_cache_NKbd: Ref
    v_cache_NKbd: Ref
    k_scale: Ref | None
    v_scale: Ref | None
    block_tables_SB: Ref

    @staticmethod
    def from_refs(refs: tuple[Ref, ...]) -> Context:
        """From (block tables, k cache, v cache) or these and (k scale, v scale)."""
        tables, k_cache, v_cache, *scales = refs
        k_scale, v_scale = scales or (None, None)
        return Context(k_cache, v_cache, k_scale, v_scale, tables)


def padded(size: int) -> int:
    """The power of two, 16 at least, that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def decode_kernel(
    first_tile_S: Ref,
    end_tile_S: Ref,
    tiles_per_split_S: Ref,
    seq_lens_S: Ref,
    q_SHd: Ref,
    *refs: Ref,
    shape: TileShape,
) -> None:
    """Program (s, h, c): KV head h of sequence s over the c-th split of its context.

    Writes the split's part of partial [C, S, H, d], peak and total [C, S, H] (see `split_k`), or nothing where
    the sequence has fewer splits.
    """
    *context_refs, partial_CSHd, peak_CSH, total_CSH = refs
    context = Context.from_refs(tuple(context_refs))
    sequence, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    per_split = tiles_per_split_S[sequence]
    first = first_tile_S[sequence] + split * per_split
    end = jnp.minimum(first + per_split, end_tile_S[sequence])

    @pl.when(first < end)
    def attend() -> None:
        row, column = lax.iota(jnp.int32, shape.matrix_rows), lax.iota(jnp.int32, shape.padded_dim)
        head = kv_head * shape.group + row
        real = row < shape.group
        inside = real[:, None] & (column < shape.head_dim)[None, :]
        q = plt.load(q_SHd.at[sequence, head[:, None], column[None, :]], mask=inside, other=0)
        length = seq_lens_S[sequence]

        def tile(index: jax.Array, state: State) -> State:
            position = index * shape.block_k + lax.iota(jnp.int32, shape.block_k)
            readable = position < length
            if shape.sliding_window is not None:
                readable &= position >= length - shape.sliding_window
            return _attend(
                shape,
                context,
                q,
                sequence,
                kv_head,
                index,
                state,
                readable=readable,
                visible=readable[None, :],
            )

        acc, peak, total = lax.fori_loop(first, end, tile, _nothing_seen(shape))
        plt.store(partial_CSHd.at[split, sequence, head[:, None], column[None, :]], acc, mask=inside)
        plt.store(peak_CSH.at[split, sequence, head], peak * shape.log2_units, mask=real)
        plt.store(total_CSH.at[split, sequence, head], total, mask=real)


def combine_kernel(
    num_splits_S: Ref, partial_CSHd: Ref, peak_CSH: Ref, total_CSH: Ref, *refs: Ref, padded_dim: int
) -> None:
    """Program (s, h): head h of row s of the output [S or more, H, d], the last of `refs`, from its splits' results.

    All splits at once, and none that the row does not have is read. The sums'
    order depends on static sizes only.
    """
    out_SHd = refs[-1]
    max_splits, head_dim = partial_CSHd.shape[0], partial_CSHd.shape[3]
    sequence, head = pl.program_id(0), pl.program_id(1)
    split = lax.iota(jnp.int32, 1 << (max_splits - 1).bit_length())
    column = lax.iota(jnp.int32, padded_dim)
    real = split < num_splits_S[sequence]
    inside = real[:, None] & (column < head_dim)[None, :]
    peak = plt.load(peak_CSH.at[split, sequence, head], mask=real, other=-jnp.inf)
    weight = jnp.exp2(peak - jnp.maximum(peak.max(axis=0), _NO_PEAK))
    total = (plt.load(total_CSH.at[split, sequence, head], mask=real, other=0) * weight).sum(axis=0)
    partial = plt.load(partial_CSHd.at[split[:, None], sequence, head, column[None, :]], mask=inside, other=0)
    out = (partial * weight[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)
    plt.store(out_SHd.at[sequence, head, column], out.astype(out_SHd.dtype), mask=column < head_dim)


def prefill_kernel(
    owner_M: Ref, start_M: Ref, position_M: Ref, rows_M: Ref, q_THd: Ref, *refs: Ref, shape: TileShape
) -> None:
    """Program (m, h): KV head h of the query tokens of tile m, counted from the last tile, which sees the most.

    Writes the tile's rows of the output [T, H, d], which stands in for an input of the same memory (the last but one
    of `refs`). The four facts of each tile: see `prefill_tiles.PrefillTiles`.
    """
    *context_refs, _, out_THd = refs
    context = Context.from_refs(tuple(context_refs))
    index, kv_head = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    num_tokens = rows_M[index]

    @pl.when(num_tokens > 0)
    def attend() -> None:
        sequence, position = owner_M[index], position_M[index]
        row, column = lax.iota(jnp.int32, shape.matrix_rows), lax.iota(jnp.int32, shape.padded_dim)
        token = lax.div(row, shape.group)
        inside = (token < num_tokens)[:, None] & (column < shape.head_dim)[None, :]
        packed = start_M[index] + token
        head = kv_head * shape.group + lax.rem(row, shape.group)
        q = plt.load(q_THd.at[packed[:, None], head[:, None], column[None, :]], mask=inside, other=0)
        last = position + num_tokens - 1
        row_position = position + token

        def edge_tile(index: jax.Array, state: State) -> State:
            key = index * shape.block_k + lax.iota(jnp.int32, shape.block_k)
            readable = key <= last
            visible = key[None, :] <= row_position[:, None]
            if shape.sliding_window is not None:
                readable &= key > position - shape.sliding_window
                visible &= key[None, :] > row_position[:, None] - shape.sliding_window
            return _attend(
                shape, context, q, sequence, kv_head, index, state, readable=readable, visible=visible
            )

        def full_tile(index: jax.Array, state: State) -> State:
            return _attend(shape, context, q, sequence, kv_head, index, state, readable=None, visible=None)

        first, full, causal_edge, end = _tile_ranges(shape, position, last)
        state = _nothing_seen(shape)
        if shape.sliding_window is not None:
            state = lax.fori_loop(first, full, edge_tile, state)
        state = lax.fori_loop(full, causal_edge, full_tile, state)
        acc, _, total = lax.fori_loop(causal_edge, end, edge_tile, state)
        out = acc / total[:, None]  # a row sees its own token at least
        plt.store(
            out_THd.at[packed[:, None], head[:, None], column[None, :]],
            out.astype(out_THd.dtype),
            mask=inside,
        )


def _tile_ranges(
    shape: TileShape, position: jax.Array, last: jax.Array
) -> tuple[jax.Array | int, jax.Array | int, jax.Array, jax.Array]:
    """(a, b, c, d): of the context tiles for queries at `position` to `last`, every query sees all of tiles [b, c),
    some don't see all of [a, b) (the sliding window's edge) and [c, d) (the causal one)."""
    end = lax.div(last + shape.block_k, shape.block_k)
    causal_edge = lax.div(position + 1, shape.block_k)
    if shape.sliding_window is None:
        return 0, 0, causal_edge, end
    first = lax.div(jnp.maximum(position - (shape.sliding_window - 1), 0), shape.block_k)
    seen_by_last = jnp.maximum(last - (shape.sliding_window - 1), 0)
    full = lax.div(seen_by_last + (shape.block_k - 1), shape.block_k)
    full = jnp.minimum(full, end)
    return first, full, jnp.maximum(causal_edge, full), end


def _nothing_seen(shape: TileShape) -> State:
    rows = (shape.matrix_rows,)
    return (
        jnp.zeros((*rows, shape.padded_dim), jnp.float32),
        jnp.full(rows, _NO_PEAK, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )


def _attend(
    shape: TileShape,
    context: Context,
    q_MD: jax.Array,
    sequence: jax.Array,
    kv_head: jax.Array,
    index: jax.Array,
    state: State,
    *,
    readable: jax.Array | None,
    visible: jax.Array | None,
) -> State:
    """One step of the online softmax, over tile `index` of a sequence's context.

    Args:
      readable: bool [k]; tokens that are the sequence's own: nothing else of the caches is read. None: all.
      visible: bool, broadcastable to [M, k]; what each row may see. None: everything. A tile of which a row sees
        nothing leaves that row's state as it is, bit for bit.
    """
    acc, peak, total = state
    position = index * shape.block_k + lax.iota(jnp.int32, shape.block_k)
    block_k = _blocks_of(shape, context, sequence, index, position, readable)
    slot_k = lax.rem(position, shape.block_size)

    def read(cache: Ref) -> jax.Array:
        return _read_tile(shape, cache, block_k, slot_k, kv_head, readable)

    scores = _dot(q_MD, read(context.k_cache_NKbd).astype(q_MD.dtype), transpose=True)
    if context.k_scale is not None:
        scores *= _read_scale(context.k_scale, block_k, kv_head, readable)[None, :]
    if shape.soft_cap is not None:
        scores = jnp.tanh(scores * (shape.scale / shape.soft_cap))
    elif shape.scale <= 0:
        scores *= shape.scale
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    decay = jnp.exp2((peak - new_peak) * shape.log2_units)
    # Scaled only here, where one fused operation does it, with a mask or without: a row's bits must not depend on which
    # of its tiles had one.
    weights = jnp.exp2(scores * shape.log2_units - (new_peak * shape.log2_units)[:, None])
    total = total * decay + weights.sum(axis=1)
    if context.v_scale is not None:
        weights *= _read_scale(context.v_scale, block_k, kv_head, readable)[None, :]
    values = read(context.v_cache_NKbd).astype(shape.value_dtype)
    return acc * decay[:, None] + _dot(weights.astype(shape.value_dtype), values), new_peak, total


def _blocks_of(
    shape: TileShape,
    context: Context,
    sequence: jax.Array,
    index: jax.Array,
    position: jax.Array,
    readable: jax.Array | None,
) -> jax.Array:
    """int32: the cache blocks of a tile's tokens [k], or the one block [] that holds them all."""
    if shape.block_size % shape.block_k == 0:
        return context.block_tables_SB[sequence, lax.div(index * shape.block_k, shape.block_size)]
    entries = context.block_tables_SB.at[sequence, lax.div(position, shape.block_size)]
    return _load(entries, readable)


def _read_tile(
    shape: TileShape,
    cache_NKbd: Ref,
    block: jax.Array,
    slot_k: jax.Array,
    kv_head: jax.Array,
    readable: jax.Array | None,
) -> jax.Array:
    """[k, D]: keys or values as the cache holds them, 0 where there are none to be read."""
    column = lax.iota(jnp.int32, shape.padded_dim)[None, :]
    mask = None if readable is None else readable[:, None]
    if shape.padded_dim != shape.head_dim:
        real = column < shape.head_dim
        mask = real if mask is None else mask & real
    if mask is not None:
        mask = jnp.broadcast_to(mask, (shape.block_k, shape.padded_dim))
    block = block[:, None] if block.ndim else block
    return _load(cache_NKbd.at[block, kv_head, slot_k[:, None], column], mask)


def _read_scale(scale: Ref, block: jax.Array, kv_head: jax.Array, readable: jax.Array | None) -> jax.Array:
    """float32 [k] from a scale [N or 1, K or 1]; 0 where a token is not to be read."""
    num_blocks, num_kv_heads = scale.shape
    head = kv_head if num_kv_heads > 1 else 0
    if num_blocks == 1 or not block.ndim:
        value = scale[block if num_blocks > 1 else 0, head]
        return jnp.full((1,), value, jnp.float32)
    return _load(scale.at[block, head], readable)


def _load(ref: Ref, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return plt.load(ref)
    return plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _dot(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    """float32; of float32 operands truly so, without TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=transpose, precision=precision)
