"""Paged attention in plain XLA, for every platform: the path that always works.

Work is cut into tiles: a group of up to 8 decode rows, or up to 32 query rows of one prefill chunk. A tile walks its
context in windows of a few blocks with an online softmax. Both loops run as often as the real lengths ask (the
trip counts are data, not shapes), so neither the width of the block table nor the padding of the batch costs
anything, and one executable serves every context length.

A row's sums run over the same windows in the same order whatever shares its tile: a window past a row's own
length multiplies by one and adds zero, exactly.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_DECODE_ROWS = 8  # sequences a decode tile holds
_FEW_DECODE_ROWS = (
    4  # the same in a small batch; below 4 XLA's CPU products round differently (seen on 0.11.2)
)
_PREFILL_ROWS = 32  # query rows a prefill tile holds
_WINDOW_TOKENS = 128  # context tokens a tile reads at a time, rounded to whole blocks
_MASKED = -1e30  # finite, so that a fully masked row yields exp(0) * 0 and not NaN


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
) -> jax.Array:
    """See `api.ragged_paged_attention`."""
    num_rows = min(q_THd.shape[0], block_tables_SB.shape[0])
    decoded = paged_decode(
        q_THd[:num_rows],
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB=block_tables_SB[:num_rows],
        seq_lens_S=seq_lens_S[:num_rows],
        num_seqs=num_decodes,
        scale=scale,
    )
    out_THd = jnp.zeros_like(q_THd).at[:num_rows].set(decoded)
    return _prefill_tiles(
        out_THd,
        q_THd,
        partial(_attend_tile, k_cache_NKbd, v_cache_NKbd, scale),
        block_tables_SB,
        seq_lens_S,
        cu_q_lens,
        num_decodes,
        num_seqs,
    )


def paged_decode(
    q_SHd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    block_tables_SB: jax.Array,
    seq_lens_S: jax.Array,
    num_seqs: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.paged_decode`."""
    num_rows = q_SHd.shape[0]
    rows = _DECODE_ROWS if num_rows > _FEW_DECODE_ROWS else _FEW_DECODE_ROWS
    padded = -(-num_rows // rows) * rows  # a slice past the end would be clamped onto other rows
    pad = lambda x: jnp.pad(x, [(0, padded - num_rows)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    q, tables, lens = pad(q_SHd), pad(block_tables_SB), pad(seq_lens_S)

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * rows
        q_RHd = lax.dynamic_slice_in_dim(q, start, rows)
        table_RB = lax.dynamic_slice_in_dim(tables, start, rows)
        len_R = lax.dynamic_slice_in_dim(lens, start, rows)
        attended = _attend_tile(
            k_cache_NKbd, v_cache_NKbd, scale, q_RHd[:, None], table_RB, (len_R - 1)[:, None]
        )
        return lax.dynamic_update_slice_in_dim(out, attended[:, 0].astype(out.dtype), start, 0)

    tiles = (num_seqs + rows - 1) // rows
    return lax.fori_loop(0, tiles, tile, jnp.zeros_like(q))[:num_rows]


def _prefill_tiles(out_THd, q_THd, attend, tables_SB, seq_lens_S, cu_q_lens, num_decodes, num_seqs):  # type: ignore[no-untyped-def]
    """Fill in the rows of every sequence from `num_decodes` on."""
    num_tokens = q_THd.shape[0]
    rows = min(_PREFILL_ROWS, num_tokens)
    # Room for a tile that starts at the last token: slices must never be clamped.
    q = jnp.pad(q_THd, ((0, rows), (0, 0), (0, 0)))
    out = jnp.pad(out_THd, ((0, rows), (0, 0), (0, 0)))
    num_sequences = tables_SB.shape[0]
    sequence = jnp.arange(num_sequences)
    q_lens = jnp.where((sequence >= num_decodes) & (sequence < num_seqs), cu_q_lens[1:] - cu_q_lens[:-1], 0)
    tiles_S = (q_lens + rows - 1) // rows
    tiles_end_S = jnp.cumsum(tiles_S)

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        s = jnp.searchsorted(tiles_end_S, index, side="right")
        offset = (index - (tiles_end_S[s] - tiles_S[s])) * rows
        start = cu_q_lens[s] + offset
        row = jnp.arange(rows)
        position = seq_lens_S[s] - q_lens[s] + offset + row
        real = offset + row < q_lens[s]
        q_QHd = lax.dynamic_slice_in_dim(q, start, rows)
        attended = attend(q_QHd[None], tables_SB[s][None], jnp.where(real, position, -1)[None])[0]
        before = lax.dynamic_slice_in_dim(out, start, rows)
        merged = jnp.where(real[:, None, None], attended.astype(out.dtype), before)
        return lax.dynamic_update_slice_in_dim(out, merged, start, 0)

    return lax.fori_loop(0, tiles_end_S[-1], tile, out)[:num_tokens]


def _attend_tile(
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    scale: float,
    q_RQHd: jax.Array,
    table_RB: jax.Array,
    q_position_RQ: jax.Array,
) -> jax.Array:
    """Attention of R sequences with Q query rows each. A row at position -1 is padding and yields 0.

    Returns: float32 [R, Q, H, d].
    """
    num_rows, num_queries, num_heads, head_dim = q_RQHd.shape
    _, num_kv_heads, block_size, _ = k_cache_NKbd.shape
    group = num_heads // num_kv_heads
    blocks = max(1, min(_WINDOW_TOKENS // block_size, table_RB.shape[1]))
    window = blocks * block_size
    # [R, K, Q * G, d]: the query rows that share a KV head form one matrix.
    q = q_RQHd.reshape(num_rows, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_rows, num_kv_heads, num_queries * group, head_dim)
    last_position_RM = jnp.repeat(q_position_RQ, group, axis=1)  # of each matrix row
    table = jnp.pad(table_RB, ((0, 0), (0, -table_RB.shape[1] % blocks)))
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        acc, peak, total = carry
        block_ids = lax.dynamic_slice_in_dim(table, index * blocks, blocks, axis=1)

        def gather(cache: jax.Array) -> jax.Array:
            blocks_RBKbd = cache[block_ids]
            return blocks_RBKbd.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, window, head_dim)

        key_position = index * window + jnp.arange(window)
        visible_RMw = key_position <= last_position_RM[:, :, None]
        scores = jnp.einsum(
            "rkmd,rkwd->rkmw",
            q,
            gather(k_cache_NKbd),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(visible_RMw[:, None], scores * scale, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        # A window without a visible key must add nothing, also while the peak still is _MASKED.
        weights = jnp.where(visible_RMw[:, None], jnp.exp(scores - new_peak[..., None]), 0.0)
        # Slots past the last token may hold NaN, and 0 * NaN is NaN: clear them.
        filled_Rw = key_position <= q_position_RQ.max(axis=1, keepdims=True)
        values = jnp.where(filled_Rw[:, None, :, None], gather(v_cache_NKbd), 0)
        added = jnp.einsum(
            "rkmw,rkwd->rkmd",
            weights.astype(q.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return acc * decay[..., None] + added, new_peak, total * decay + weights.sum(-1)

    shape = q.shape[:3]
    init = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    steps = (q_position_RQ.max() + window) // window
    acc, _, total = lax.fori_loop(0, steps, step, init)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(num_rows, num_kv_heads, num_queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_rows, num_queries, num_heads, head_dim)
