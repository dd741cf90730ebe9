"""Paged attention in plain XLA, for every platform: the path that always works.

Work is cut into tiles: a group of up to 8 decode rows, or up to 32 query rows of one prefill chunk. A tile walks its
context in windows of a few blocks with an online softmax. Both loops run as often as the real lengths ask (the
trip counts are data, not shapes), so neither the width of the block table nor the padding of the batch costs
anything, and one executable serves every context length.

A row's sums run over the same windows in the same order whatever shares its tile: a window past a row's own
length multiplies by one and adds zero, exactly.

That leaves the size of the tile, by which XLA chooses how it sums a row and whether it computes an exponential in a
vector or alone, with other bits. A deterministic backend therefore decays by powers of two, which are exact, and lets
matrix products do the sums: XLA's CPU backend computes each of their rows alike however many (at least 2) there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.backends import Backend
from pallas_kernels.paged_attention.prefill_tiles import PrefillTiles, cut_chunks

_DECODE_ROWS = 8  # sequences a decode tile holds
_FEW_DECODE_ROWS = (
    4  # the same in a small batch; below 4 XLA's CPU products round differently (seen on 0.11.2)
)
_PREFILL_ROWS = 32  # query rows a prefill tile holds
_WINDOW_TOKENS = 128  # context tokens a tile reads at a time, rounded to whole blocks
_LOG2_E = 1.4426950408889634
_SUM_COLUMNS = 16  # a product of fewer columns becomes a matrix-vector one
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
    backend: Backend,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """See `api.ragged_paged_attention`."""
    num_tokens = q_THd.shape[0]
    num_rows = min(num_tokens, block_tables_SB.shape[0])
    context = _Context(
        k_cache_NKbd, v_cache_NKbd, k_scale, v_scale, scale, sliding_window, soft_cap, backend.deterministic
    )
    decoded = _decode_tiles(
        q_THd[:num_rows], context, block_tables_SB[:num_rows], seq_lens_S[:num_rows], num_decodes
    )
    out_THd = jnp.pad(decoded, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    tiles = cut_chunks(
        num_tokens=num_tokens,
        rows=min(_PREFILL_ROWS, num_tokens),
        seq_lens_S=seq_lens_S,
        cu_q_lens=cu_q_lens,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
    )
    return _prefill_tiles(out_THd, q_THd, context, block_tables_SB, tiles)


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
    context = _Context(
        k_cache_NKbd, v_cache_NKbd, k_scale, v_scale, scale, sliding_window, soft_cap, backend.deterministic
    )
    return _decode_tiles(q_SHd, context, block_tables_SB, seq_lens_S, num_seqs)


@dataclass(frozen=True)
class _Context:
    """What every tile reads, see `api.ragged_paged_attention`."""

    k_cache_NKbd: jax.Array
    v_cache_NKbd: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    deterministic: bool


def _decode_tiles(
    q_SHd: jax.Array, context: _Context, tables_SB: jax.Array, seq_lens_S: jax.Array, num_seqs: jax.Array
) -> jax.Array:
    """[S, H, d]: the first `num_seqs` rows attended, the rest 0."""
    num_rows = q_SHd.shape[0]
    rows = _DECODE_ROWS if num_rows > _FEW_DECODE_ROWS else _FEW_DECODE_ROWS
    extra = -num_rows % rows  # a slice past the end would be clamped onto other rows
    q = jnp.pad(q_SHd, ((0, extra), (0, 0), (0, 0)))
    tables = jnp.pad(tables_SB, ((0, extra), (0, 0)))
    real = lax.iota(jnp.int32, num_rows) < num_seqs
    last = jnp.pad(jnp.where(real, seq_lens_S, 0), (0, extra)) - 1

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * rows
        attended = _attend_tile(
            context,
            _rows_from(q, start, rows)[:, None],
            _rows_from(tables, start, rows),
            _rows_from(last, start, rows)[:, None],
        )
        return _set_rows_from(out, attended[:, 0].astype(out.dtype), start)

    tiles = lax.div(num_seqs + (rows - 1), rows)
    return lax.fori_loop(0, tiles, tile, jnp.zeros_like(q))[:num_rows]


def _prefill_tiles(
    out_THd: jax.Array, q_THd: jax.Array, context: _Context, tables_SB: jax.Array, tiles: PrefillTiles
) -> jax.Array:
    """`out_THd` with the rows of every prefill chunk filled in."""
    num_tokens = q_THd.shape[0]
    rows = min(_PREFILL_ROWS, num_tokens)
    # Room for a tile that starts at the last token: slices must never be clamped.
    q = jnp.pad(q_THd, ((0, rows), (0, 0), (0, 0)))
    out = jnp.pad(out_THd, ((0, rows), (0, 0), (0, 0)))
    tile_facts_M4 = jnp.stack([tiles.owner_M, tiles.start_M, tiles.position_M, tiles.rows_M], axis=1)
    row = lax.iota(jnp.int32, rows)

    def tile(index: jax.Array, out: jax.Array) -> jax.Array:
        owner, start, position, num_real = _row(tile_facts_M4, index)
        real = row < num_real
        attended = _attend_tile(
            context,
            _rows_from(q, start, rows)[None],
            _rows_from(tables_SB, owner, 1),
            jnp.where(real, position + row, -1)[None],
        )[0]
        merged = jnp.where(real[:, None, None], attended.astype(out.dtype), _rows_from(out, start, rows))
        return _set_rows_from(out, merged, start)

    return lax.fori_loop(0, tiles.count, tile, out)[:num_tokens]


def _attend_tile(
    context: _Context, q_RQHd: jax.Array, table_RB: jax.Array, q_position_RQ: jax.Array
) -> jax.Array:
    """Attention of R sequences with Q query rows each. A row at position -1 is padding and yields 0.

    Returns: float32 [R, Q, H, d].
    """
    num_rows, num_queries, num_heads, head_dim = q_RQHd.shape
    _, num_kv_heads, block_size, _ = context.k_cache_NKbd.shape
    group = num_heads // num_kv_heads
    if context.deterministic and num_queries * group == 1:  # a matrix of one row would be a vector
        padded = jnp.pad(q_RQHd, ((0, 0), (0, 1), (0, 0), (0, 0)))
        positions = jnp.pad(q_position_RQ, ((0, 0), (0, 1)), constant_values=-1)
        return _attend_tile(context, padded, table_RB, positions)[:, :1]
    blocks = max(1, min(_WINDOW_TOKENS // block_size, table_RB.shape[1]))
    window = blocks * block_size
    # [R, K, M, d] with M = Q * G: the query rows that share a KV head form one matrix.
    q = q_RQHd.reshape(num_rows, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(num_rows, num_kv_heads, num_queries * group, head_dim)
    last_visible_RM = jnp.repeat(q_position_RQ, group, axis=1)  # by matrix row
    last_filled_R1 = q_position_RQ.max(axis=1, keepdims=True)
    table = jnp.pad(table_RB, ((0, 0), (0, -table_RB.shape[1] % blocks)))
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    in_window = lax.iota(jnp.int32, window)
    weigh, row_sum = (_weigh_exactly, _product_sum) if context.deterministic else (_weigh, _sum)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        acc, peak, total = carry
        block_ids = lax.dynamic_slice(
            table, (0, index * blocks), (num_rows, blocks), allow_negative_indices=False
        )

        def gather(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
            found = cache.at[block_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
            if scale is not None:
                by_block = (
                    jnp.broadcast_to(scale, cache.shape[:2]).at[block_ids].get(mode="promise_in_bounds")
                )
                found = (found.astype(jnp.float32) * by_block[..., None, None]).astype(q.dtype)
            return found.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, window, head_dim)

        key_position = index * window + in_window
        visible = key_position <= last_visible_RM[:, :, None]
        if context.sliding_window is not None:
            visible &= key_position > last_visible_RM[:, :, None] - context.sliding_window
        visible = visible[:, None]
        # Slots past the last token may hold NaN, and 0 * NaN is NaN: their values are cleared.
        filled = (key_position <= last_filled_R1)[:, None, :, None]
        scores = product("rkmd,rkwd->rkmw", q, gather(context.k_cache_NKbd, context.k_scale)) * context.scale
        if context.soft_cap is not None:
            scores = context.soft_cap * jnp.tanh(scores / context.soft_cap)
        new_peak, decay, weights = weigh(scores, visible, peak)
        values = jnp.where(filled, gather(context.v_cache_NKbd, context.v_scale), 0)
        added = product("rkmw,rkwd->rkmd", weights.astype(q.dtype), values)
        return acc * decay[..., None] + added, new_peak, total * decay + row_sum(weights)

    per_row = q.shape[:3]
    init = (jnp.zeros(q.shape, jnp.float32), jnp.full(per_row, _MASKED), jnp.zeros(per_row))
    first: jax.Array | int = 0
    if context.sliding_window is not None:
        # The oldest position that any real row sees; padding rows (-1) must not pull it down.
        oldest = jnp.where(
            q_position_RQ >= 0, q_position_RQ - (context.sliding_window - 1), jnp.iinfo("int32").max
        )
        first = lax.div(jnp.maximum(oldest.min(), 0), window)
    end = lax.div(last_filled_R1.max() + window, window)
    acc, _, total = lax.fori_loop(first, end, step, init)
    out = acc / jnp.where(total > 0, total, 1.0)[..., None]
    out = out.reshape(num_rows, num_kv_heads, num_queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_rows, num_queries, num_heads, head_dim)


def _weigh(
    scores_RKMw: jax.Array, visible: jax.Array, peak_RKM: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax: (new peak, factor for what was summed before, weights of this window).

    Args:
      visible: bool, broadcastable to the scores.
      peak_RKM: the largest score so far.
    """
    scores = jnp.where(visible, scores_RKMw, _MASKED)
    new_peak = jnp.maximum(peak_RKM, scores.max(-1))
    # A window without a visible key must add nothing, also while the peak still is _MASKED.
    weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    return new_peak, jnp.exp(peak_RKM - new_peak), weights


def _weigh_exactly(
    scores_RKMw: jax.Array, visible: jax.Array, peak_RKM: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_weigh` to base 2 with the peak rounded up to an integer, so that the factor is a power of two."""
    scores = jnp.where(visible, scores_RKMw * _LOG2_E, _MASKED)
    new_peak = jnp.maximum(peak_RKM, jnp.ceil(scores.max(-1)))
    exponent = jnp.clip(peak_RKM - new_peak, -126, 0).astype(jnp.int32)
    decay = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    weights = jnp.where(visible, jnp.exp2(scores - new_peak[..., None]), 0.0)
    return new_peak, decay, weights


def _sum(weights_RKMw: jax.Array) -> jax.Array:
    return weights_RKMw.sum(-1)


def _product_sum(weights_RKMw: jax.Array) -> jax.Array:
    """The sums of the rows, [R, K, M], by a matrix product."""
    num_rows, num_kv_heads, _, window = weights_RKMw.shape
    ones_RKwc = jnp.ones((num_rows, num_kv_heads, window, _SUM_COLUMNS), weights_RKMw.dtype)
    return jnp.einsum("rkmw,rkwc->rkmc", weights_RKMw, ones_RKwc, precision=lax.Precision.HIGHEST)[..., 0]


# Slices whose starts are known to be in bounds and not negative: the checks that jax adds otherwise would be
# repeated in every layer of a model, and compiled each time.


def _rows_from(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    begin: tuple[jax.Array | int, ...] = (start, *(0,) * (x.ndim - 1))
    return lax.dynamic_slice(x, begin, (rows, *x.shape[1:]), allow_negative_indices=False)


def _row(x: jax.Array, index: jax.Array) -> jax.Array:
    return _rows_from(x, index, 1)[0]


def _set_rows_from(x: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, rows, (start, *(0,) * (x.ndim - 1)), allow_negative_indices=False)
