"""Paged attention in plain XLA, for every platform: the path that always works.

The context of a row is cut into windows of a few blocks. A window gives a partial result by itself, and a row's are
merged one after the other, so a row's sums run over the same windows in the same order whatever is computed beside it.

Decode walks a list of all rows' windows, so many at a time, whoever's they are. Prefill takes tiles of up to 32
query rows of one chunk, and walks the windows of each. Loops run as often as the real lengths ask (trip counts are
data, not shapes), so neither the width of the block table nor the padding of the batch costs anything, and one
executable serves every context length.

That leaves the size of a tile, by which XLA chooses how it sums a row and whether it computes an exponential in a
vector or alone, with other bits. A deterministic backend therefore scales by powers of two, which are exact, and lets
matrix products do the sums: XLA's CPU backend computes each of their rows alike however many (at least 2) there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.backends import Backend
from pallas_kernels.paged_attention.prefill_tiles import PrefillTiles, cut_chunks

_PREFILL_ROWS = 32  # query rows a prefill tile holds
_WINDOW_TOKENS = 128  # context tokens of a window, rounded to whole blocks
_DECODE_WINDOW_TOKENS = 64  # the same when decoding, where windows of unequal rows share a tile
_DECODE_TOKENS = 1024  # context tokens of a decode tile
_FEW_DECODE_TOKENS = 512  # the same in a small batch
_FEW_ROWS = 4  # a batch is small up to here
_KEPT_WINDOWS = 4  # windows for each row whose results are kept until they are merged
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
    """[S, H, d]: the first `num_seqs` rows attended, the rest 0.

    The windows of all rows, row after row, are one list; tiles take equally many. The results of some tiles are kept,
    then each row merges its own.
    """
    num_rows = q_SHd.shape[0]
    windows = _Windows.of(context, tables_SB.shape[1], _decode_window_tokens(context))
    tokens = _DECODE_TOKENS if num_rows > _FEW_ROWS else _FEW_DECODE_TOKENS
    per_tile = max(
        4, tokens // windows.tokens
    )  # fewer, and XLA's CPU products round differently (seen on 0.11.2)
    tiles_kept = -(-_KEPT_WINDOWS * num_rows // per_tile)
    kept_windows = tiles_kept * per_tile
    q_SKMd = _matrix_rows(context, q_SHd[:, None])
    last_S = jnp.where(lax.iota(jnp.int32, num_rows) < num_seqs, seq_lens_S, 0) - 1
    first_S = windows.first(context, last_S)
    end_S = jnp.cumsum(windows.end(last_S) - first_S)
    start_S = jnp.concatenate([jnp.zeros(1, jnp.int32), end_S[:-1]])
    total = end_S[-1]
    table_SWb = windows.cut(tables_SB)

    def attend(tile: jax.Array) -> _Partial:
        item_R = tile * per_tile + lax.iota(jnp.int32, per_tile)
        owner_R = jnp.minimum((item_R[:, None] >= end_S).sum(-1, dtype=jnp.int32), num_rows - 1)
        real_R = item_R < total
        window_R = jnp.where(real_R, first_S[owner_R] + item_R - start_S[owner_R], 0)
        last_R1 = jnp.where(real_R, last_S[owner_R], -1)[:, None]
        position_R = window_R * windows.tokens
        return _attend_window(
            context, q_SKMd[owner_R], table_SWb[owner_R, window_R], position_R, last_R1, last_R1
        )

    def fill_and_merge(index: jax.Array, merged: _Partial) -> _Partial:
        first_tile = index * tiles_kept
        first_item = index * kept_windows

        def keep(tile: jax.Array, kept: _Partial) -> _Partial:
            start = (tile - first_tile) * per_tile
            return jax.tree.map(lambda all_, new: _set_rows_from(all_, new, start), kept, attend(tile))

        last_tile = jnp.minimum(first_tile + tiles_kept, lax.div(total + (per_tile - 1), per_tile))
        kept = lax.fori_loop(first_tile, last_tile, keep, _nothing(kept_windows, q_SKMd))
        from_S = jnp.maximum(start_S, first_item)
        count_S = jnp.minimum(end_S, first_item + kept_windows) - from_S

        def merge_next(step: jax.Array, merged: _Partial) -> _Partial:
            has_S = step < count_S
            item_S = jnp.where(has_S, from_S + step - first_item, 0)
            # Chosen, and not multiplied by 0: another row's result may hold NaN.
            mine = jax.tree.map(
                lambda kept, none: jnp.where(has_S.reshape(-1, *(1,) * (none.ndim - 1)), kept[item_S], none),
                kept,
                _nothing(num_rows, q_SKMd),
            )
            return _merge(context, merged, mine)

        return lax.fori_loop(0, jnp.maximum(count_S.max(), 0), merge_next, merged)

    rounds = lax.div(total + (kept_windows - 1), kept_windows)
    merged = lax.fori_loop(0, rounds, fill_and_merge, _nothing(num_rows, q_SKMd))
    return _finish(merged, 1)[:, 0].astype(q_SHd.dtype)


def _decode_window_tokens(context: _Context) -> int:
    """A deterministic row's windows are the same whether it is decoded or part of a chunk."""
    return _WINDOW_TOKENS if context.deterministic else _DECODE_WINDOW_TOKENS


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
        attended = _attend_chunk(
            context,
            _rows_from(q, start, rows),
            _row(tables_SB, owner),
            jnp.where(real, position + row, -1),
        )
        merged = jnp.where(real[:, None, None], attended.astype(out.dtype), _rows_from(out, start, rows))
        return _set_rows_from(out, merged, start)

    return lax.fori_loop(0, tiles.count, tile, out)[:num_tokens]


def _attend_chunk(
    context: _Context, q_QHd: jax.Array, table_B: jax.Array, position_Q: jax.Array
) -> jax.Array:
    """Attention of rows of one sequence: float32 [Q, H, d]. A row at position -1 is padding and yields 0."""
    windows = _Windows.of(context, table_B.shape[0], _WINDOW_TOKENS)
    q_1KMd = _matrix_rows(context, q_QHd[None])
    last_visible_1M = jnp.repeat(position_Q, q_1KMd.shape[2] // q_QHd.shape[0])[None]
    last_filled_11 = position_Q.max()[None, None]
    table_Wb = windows.cut(table_B[None])[0]

    def step(index: jax.Array, merged: _Partial) -> _Partial:
        ids_1b = _rows_from(table_Wb, index, 1)
        start_1 = (index * windows.tokens)[None]
        new = _attend_window(context, q_1KMd, ids_1b, start_1, last_visible_1M, last_filled_11)
        return _merge(context, merged, new)

    # The oldest position that any real row sees; padding rows (-1) must not pull it down.
    oldest = jnp.where(position_Q >= 0, position_Q, jnp.iinfo("int32").max).min()
    first = windows.first(context, oldest)
    merged = lax.fori_loop(first, windows.end(position_Q.max()), step, _nothing(1, q_1KMd))
    return _finish(merged, q_QHd.shape[0])[0]


@dataclass(frozen=True)
class _Windows:
    """How a context is cut.

    Attributes:
      blocks, tokens: of a window.
    """

    blocks: int
    tokens: int

    @classmethod
    def of(cls, context: _Context, table_width: int, tokens: int) -> _Windows:
        block_size = context.k_cache_NKbd.shape[2]
        blocks = max(1, min(tokens // block_size, table_width))
        return cls(blocks, blocks * block_size)

    def cut(self, table_SB: jax.Array) -> jax.Array:
        """The block ids of each window, [S, W, blocks]."""
        table = jnp.pad(table_SB, ((0, 0), (0, -table_SB.shape[1] % self.blocks)))
        return table.reshape(table.shape[0], -1, self.blocks)

    def first(self, context: _Context, position: jax.Array) -> jax.Array:
        """The first window that a query at `position` (or -1) sees something of."""
        if context.sliding_window is None:
            return jnp.zeros_like(position)
        return lax.div(jnp.maximum(position - (context.sliding_window - 1), 0), self.tokens)

    def end(self, position: jax.Array) -> jax.Array:
        """One past the last of them."""
        return lax.div(position + self.tokens, self.tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Partial:
    """Attention over a part of a context, to be merged with others; all float32.

    Attributes:
      values_RKMd: sum of weight times value.
      peak_RKM: what weights are relative to: exp(score - peak), or to base 2.
      total_RKM: sum of weights.
    """

    values_RKMd: jax.Array
    peak_RKM: jax.Array
    total_RKM: jax.Array


def _nothing(num_rows: int, like_RKMd: jax.Array) -> _Partial:
    """Attention over no context, of so many rows."""
    shape = (num_rows, *like_RKMd.shape[1:])
    return _Partial(jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], _MASKED), jnp.zeros(shape[:-1]))


def _merge(context: _Context, one: _Partial, other: _Partial) -> _Partial:
    factor = _power_of_two if context.deterministic else jnp.exp
    scale = factor(-jnp.abs(one.peak_RKM - other.peak_RKM))
    higher = one.peak_RKM >= other.peak_RKM

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        # One product and not two (the other factor is 1): of a * x + b * y compilers may round either product.
        wide = (..., *(None,) * (a.ndim - higher.ndim))
        return jnp.where(higher[wide], a, b) + jnp.where(higher[wide], b, a) * scale[wide]

    return _Partial(
        add(one.values_RKMd, other.values_RKMd),
        jnp.maximum(one.peak_RKM, other.peak_RKM),
        add(one.total_RKM, other.total_RKM),
    )


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2 ** exponent, exactly, of integers up to 0; at least the smallest normal number."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -126).astype(jnp.int32) + 127) << 23, jnp.float32)


def _finish(partial: _Partial, num_queries: int) -> jax.Array:
    """float32 [R, Q, H, d]; 0 where there was no context."""
    total = partial.total_RKM
    out = partial.values_RKMd / jnp.where(total > 0, total, 1.0)[..., None]
    num_rows, num_kv_heads, matrix_rows, head_dim = out.shape
    out = out.reshape(num_rows, num_kv_heads, num_queries, matrix_rows // num_queries, head_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_queries, -1, head_dim)


def _matrix_rows(context: _Context, q_RQHd: jax.Array) -> jax.Array:
    """[R, K, M, d] with M = Q * G: the query rows that share a KV head form one matrix."""
    num_rows, num_queries, num_heads, head_dim = q_RQHd.shape
    num_kv_heads = context.k_cache_NKbd.shape[1]
    q = q_RQHd.reshape(num_rows, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, -1, head_dim)


def _attend_window(
    context: _Context,
    q_RKMd: jax.Array,
    block_ids_Rb: jax.Array,
    start_R: jax.Array,
    last_visible_RM: jax.Array,
    last_filled_R1: jax.Array,
) -> _Partial:
    """Attention over one window of each row's context.

    Args:
      start_R: the position of its first token.
      last_visible_RM, last_filled_R1: the last position that a row of the matrix sees, and the last that holds a
        token; -1 where there is none. M is 1 where all rows of the matrix see the same.
    """
    num_rows, num_kv_heads, matrix_rows, head_dim = q_RKMd.shape
    if context.deterministic and matrix_rows == 1:  # a matrix of one row would be a vector
        padded = jnp.pad(q_RKMd, ((0, 0), (0, 0), (0, 1), (0, 0)))
        both = _attend_window(context, padded, block_ids_Rb, start_R, last_visible_RM, last_filled_R1)
        return jax.tree.map(lambda x: x[:, :, :1], both)
    precision = lax.Precision.HIGHEST if q_RKMd.dtype == jnp.float32 else None

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    def gather(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = cache.at[block_ids_Rb].get(mode="promise_in_bounds", wrap_negative_indices=False)
        if scale is not None:
            by_block = jnp.broadcast_to(scale, cache.shape[:2]).at[block_ids_Rb].get(mode="promise_in_bounds")
            found = (found.astype(jnp.float32) * by_block[..., None, None]).astype(q_RKMd.dtype)
        return found.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, -1, head_dim)

    keys = gather(context.k_cache_NKbd, context.k_scale)
    position_Rw = start_R[:, None] + lax.iota(jnp.int32, keys.shape[2])
    visible = position_Rw[:, None] <= last_visible_RM[:, :, None]
    if context.sliding_window is not None:
        visible &= position_Rw[:, None] > last_visible_RM[:, :, None] - context.sliding_window
    visible = visible[:, None]
    # Slots past the last token may hold NaN, and 0 * NaN is NaN: their values are cleared.
    filled = (position_Rw <= last_filled_R1)[:, None, :, None]
    scores = product("rkmd,rkwd->rkmw", q_RKMd, keys) * context.scale
    if context.soft_cap is not None:
        scores = context.soft_cap * jnp.tanh(scores / context.soft_cap)
    peak, weights = (_weigh_exactly if context.deterministic else _weigh)(scores, visible)
    values = jnp.where(filled, gather(context.v_cache_NKbd, context.v_scale), 0)
    total = (_product_sum if context.deterministic else _sum)(weights)
    return _Partial(product("rkmw,rkwd->rkmd", weights.astype(q_RKMd.dtype), values), peak, total)


def _weigh(scores_RKMw: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(peak, weights) of a window.

    Args:
      visible: bool, broadcastable to the scores. Without any visible key the peak is _MASKED and weights are 0.
    """
    scores = jnp.where(visible, scores_RKMw, _MASKED)
    peak = scores.max(-1)
    return peak, jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)


def _weigh_exactly(scores_RKMw: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_weigh` to base 2 with the peak rounded up to an integer, so that factors between peaks are powers of two."""
    scores = jnp.where(visible, scores_RKMw * _LOG2_E, _MASKED)
    peak = jnp.ceil(scores.max(-1))
    return peak, jnp.where(visible, jnp.exp2(scores - peak[..., None]), 0.0)


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
