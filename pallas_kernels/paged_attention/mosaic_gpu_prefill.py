"""Prefill attention for Hopper: two warpgroups compute, one brings tiles of the cache by TMA.

A fixed number of programs, one for each SM, walk a list of work items; an item is one query tile of one KV head. The
tile's query tokens times the heads of the group are the rows of two matrices of 64, one for each computing warpgroup;
where 64 is no multiple of the group, the rows left over are wasted. The loading warpgroup runs ahead, into the
next item too. Items of one KV head are neighbours in the list, so that the programs that run together share its keys
and values in L2, and tiles with the longest context come first, so that the last ones to end are short.

Tiles of the context that every row sees fully are not masked.

Source: FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_dequantise import Supply, bring_tiles, raw_smem, scales_smem
from pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    COMPILER_PARAMS,
    ROWS,
    PagedCache,
    TileMath,
    add_values,
    clear_unfilled,
    fetch_tile,
    interpret_argument,
    new_carry,
    read_block_ids,
    score_tile,
    softmax_step,
    tile_iota,
)
from pallas_kernels.paged_attention.prefill_tiles import PrefillTiles

_COMPUTING = 2  # warpgroups
# Registers of a thread that computes and of one that loads; of one that widens numbers too.
_REGISTERS = (240, 24)
_REGISTERS_QUANTISED = (216, 72)
_PROGRAMS = 132  # one for each SM of an H100 or H200
_PROGRAMS_INTERPRETED = 2


def tokens_per_tile(group: int) -> int:
    """Query tokens of a tile."""
    return _COMPUTING * (ROWS // group)


def prefill_tiles(
    q_THd: jax.Array,
    cache: PagedCache,
    seq_lens_S: jax.Array,
    tiles: PrefillTiles,
    *,
    stages: int,
    math_: TileMath,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the query rows of all tiles.

    Args:
      q_THd, seq_lens_S: as in `api.ragged_paged_attention`.
      tiles: of `tokens_per_tile` query tokens.
      stages: context tiles in flight.

    Returns:
      (dtype of q [T, H, d], bool [T]: the rows that belong to a tile; the others hold anything).
    """
    num_tokens, num_heads, head_dim = q_THd.shape
    num_kv_heads = cache.k_NKbd.shape[1]
    group = num_heads // num_kv_heads
    num_tiles = tiles.start_M.shape[0]
    tokens = ROWS // group
    # Rows of one KV head one after the other, and room for a tile that starts at the last token.
    q_KRd = q_THd.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    q_KRd = jnp.pad(
        q_KRd.reshape(num_kv_heads, num_tokens * group, head_dim), ((0, 0), (0, _COMPUTING * ROWS), (0, 0))
    )
    facts_M5 = jnp.stack(
        [tiles.owner_M, tiles.start_M, tiles.position_M, tiles.rows_M, seq_lens_S[tiles.owner_M]], axis=1
    )
    slots = _slots(stages, math_)
    by_tma = plgpu.Barrier(num_arrivals=math_.blocks_per_tile, num_barriers=stages)
    loaded = plgpu.Barrier(num_barriers=slots) if math_.is_quantised else by_tma
    raw = [raw_smem(math_, stages), raw_smem(math_, stages), scales_smem(math_, stages + 1), by_tma, by_tma]

    def paged_prefill(*refs: Any) -> None:
        _run_program(refs, num_kv_heads, group, stages, math_)

    out_IWrd = plgpu.kernel(
        paged_prefill,
        out_type=jax.ShapeDtypeStruct((num_kv_heads * num_tiles, _COMPUTING, ROWS, head_dim), q_THd.dtype),
        grid=(_PROGRAMS_INTERPRETED if math_.interpret else _PROGRAMS,),
        grid_names=("program",),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        scratch_types=[
            math_.smem(_COMPUTING, ROWS, head_dim),
            *math_.tiles_smem(slots),
            math_.weights_smem(_COMPUTING),
            loaded,
            loaded,
            plgpu.Barrier(num_arrivals=_COMPUTING, num_barriers=slots),
            plgpu.Barrier(num_arrivals=_COMPUTING, num_barriers=slots + 1),
            *(raw if math_.is_quantised else []),
        ],
        compiler_params=COMPILER_PARAMS,
        **interpret_argument(math_.interpret),
    )(q_KRd, *cache.operands(math_), facts_M5, tiles.count[None])
    # Each item has room of its own in the kernel's result, so none writes another's rows; here they come together.
    token_T = lax.iota(jnp.int32, num_tokens)
    begun_TM = (tiles.start_M <= token_T[:, None]) & (tiles.rows_M > 0)
    tile_T = jnp.maximum(begun_TM.sum(-1, dtype=jnp.int32) - 1, 0)
    offset_T = token_T - tiles.start_M[tile_T]
    inside_T = (offset_T >= 0) & (offset_T < tiles.rows_M[tile_T])
    head_K1 = lax.iota(jnp.int32, num_kv_heads)[:, None]
    item_TK = (head_K1 * tiles.count + _reversed(tile_T, tiles.count)).T
    row_TK = jnp.where(inside_T[:, None], item_TK * (_COMPUTING * tokens) + offset_T[:, None], 0)
    out_RGd = out_IWrd[:, :, : tokens * group].reshape(-1, group, head_dim)
    return out_RGd.at[row_TK].get(mode="promise_in_bounds").reshape(q_THd.shape), inside_T


def _slots(stages: int, math_: TileMath) -> int:
    """Tiles that stand ready for those that compute. Those of a quantised cache wait unwidened, in half the memory."""
    return 1 if math_.is_quantised else stages


def _reversed(tile: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """Query tiles are worked on from the last: of a chunk it sees the most."""
    return num_tiles - 1 - tile


def _run_program(refs: tuple[Any, ...], num_kv_heads: int, group: int, stages: int, math_: TileMath) -> None:
    """The kernel's body."""
    num_cache_refs = 5 if math_.is_quantised else 3
    q_ref, *cache_refs = refs[: 1 + num_cache_refs]
    (fact_ref, count_ref, out_ref, qo_smem, k_smem, v_smem, *scratch) = refs[1 + num_cache_refs :]
    (weights_smem, k_loaded, v_loaded, k_released, v_released, *raw) = scratch
    cache = PagedCache.from_refs(cache_refs)
    slots = _slots(stages, math_)
    cleared = v_released.at[slots]  # one barrier more of the same kind costs no register
    supply = None
    if math_.is_quantised:
        k_raw, v_raw, scales, k_landed, v_landed = raw
        supply = Supply(
            stages=stages,
            raw=(k_raw, v_raw),
            landed=(k_landed, v_landed),
            first_landed=0,
            scales=scales,
            tile=(k_smem.at[0], v_smem.at[0]),
            ready=(k_loaded.at[0], v_loaded.at[0]),
            released=(k_released.at[0], v_released.at[0]),
        )
    tokens = ROWS // group
    computing_registers, loading_registers = _REGISTERS_QUANTISED if math_.is_quantised else _REGISTERS
    warpgroup = lax.axis_index("warpgroup")
    program = lax.axis_index("program")
    num_programs = lax.axis_size("program")

    def walk(item: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """item(its number, context tiles of the program's items before it) -> the same with its own; over all items."""

        count = count_ref[0] * num_kv_heads

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, before = carry
            return number + num_programs, item(number, before)

        return lax.while_loop(lambda carry: carry[0] < count, step, (program, jnp.int32(0)))[1]

    def locate(number: jax.Array) -> tuple[Any, ...]:
        """Item -> (KV head, facts of the query tile, first and end tile of its context)."""
        num_tiles = count_ref[0]
        kv_head = lax.div(number, num_tiles)
        query_tile = _reversed(lax.rem(number, num_tiles), num_tiles)
        row, start, position, rows, length = (fact_ref[query_tile, j] for j in range(5))
        first: jax.Array | int = 0
        if math_.sliding_window is not None:
            first = lax.div(jnp.maximum(position - (math_.sliding_window - 1), 0), jnp.int32(math_.block_k))
        end = lax.div(position + rows + (math_.block_k - 1), jnp.int32(math_.block_k))
        return kv_head, row, start, position, length, first, end

    @pl.when(warpgroup < _COMPUTING)
    def _compute() -> None:
        plgpu.set_max_registers(computing_registers, action="increase")
        qo = qo_smem.at[warpgroup]
        weights = weights_smem.at[warpgroup] if math_.interpret else None

        def item(number: jax.Array, before: jax.Array) -> jax.Array:
            kv_head, _, start, position, length, first, end = locate(number)
            my_start = start + warpgroup * tokens
            oldest = position + warpgroup * tokens  # position of the first row
            # Not by TMA: into swizzled memory that copies from multiples of 8 rows only.
            rows = q_ref.at[kv_head, pl.ds(my_start * group, ROWS)]
            qo[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()

            def step(tile: jax.Array, carry: Any, *, masked: bool) -> Any:
                use = before + (tile - first)
                slot = lax.rem(use, jnp.int32(slots))
                plgpu.barrier_wait(k_loaded.at[slot])
                scores = score_tile(qo, k_smem.at[slot], math_)
                plgpu.barrier_arrive(k_released.at[slot])
                visible = None
                if masked:
                    key = tile_iota(1, math_)
                    # Position of the row's token, counted from the tile's start.
                    query = lax.div(tile_iota(0, math_), jnp.int32(group)) + (oldest - tile * math_.block_k)
                    visible = key <= query
                    if math_.sliding_window is not None:
                        visible &= key > query - math_.sliding_window
                scales_2k = supply.scales_of(use) if supply else None
                share, carry = softmax_step(scores, visible, carry, scales_2k, math_)
                plgpu.barrier_wait(v_loaded.at[slot])
                if masked and not supply:
                    filled = length - tile * math_.block_k
                    unfilled = (
                        filled < math_.block_k
                    )  # only in a sequence's last tile, which both warpgroups mask

                    @pl.when(unfilled)
                    def _() -> None:
                        @pl.when(warpgroup == 0)
                        def _() -> None:
                            clear_unfilled(v_smem.at[slot], filled, math_)

                        plgpu.barrier_arrive(cleared)
                        plgpu.barrier_wait(cleared)

                carry = add_values(share, v_smem.at[slot], carry, weights, math_)
                plgpu.barrier_arrive(v_released.at[slot])
                return carry

            def masked_step(tile: jax.Array, carry: Any) -> Any:
                return step(tile, carry, masked=True)

            # [full_from, full_to): tiles that every row of this warpgroup sees fully.
            full_to = lax.div(jnp.minimum(oldest + 1, length), jnp.int32(math_.block_k))
            full_to = jnp.clip(full_to, first, end)
            carry = new_carry(math_)
            full_from = first
            if math_.sliding_window is not None:
                youngest = oldest + (tokens - 1)
                begin = jnp.maximum(youngest - (math_.sliding_window - 1), 0)
                full_from = lax.div(begin + (math_.block_k - 1), jnp.int32(math_.block_k))
                full_from = jnp.clip(full_from, first, full_to)
                carry = lax.fori_loop(first, full_from, masked_step, carry)
            carry = lax.fori_loop(full_from, full_to, lambda i, c: step(i, c, masked=False), carry)
            acc, _, total = lax.fori_loop(full_to, end, masked_step, carry)
            share = 1 / jnp.maximum(total, 1e-30)  # 0 in rows of padding that see nothing
            qo[...] = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(math_.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(qo, out_ref.at[number, warpgroup])
            plgpu.wait_smem_to_gmem(0)
            return before + (end - first)

        walk(item)

    @pl.when(warpgroup == _COMPUTING)
    def _load() -> None:
        plgpu.set_max_registers(loading_registers, action="decrease")

        def item(number: jax.Array, before: jax.Array) -> jax.Array:
            kv_head, row, _, _, length, first, end = locate(number)
            if supply:
                return bring_tiles(
                    supply,
                    cache,
                    row=row,
                    kv_head=kv_head,
                    first=first,
                    end=end,
                    length=length,
                    before=before,
                    math_=math_,
                )

            def load(tile: jax.Array, _: None) -> None:
                use = before + (tile - first)
                slot = lax.rem(use, jnp.int32(stages))
                ids = read_block_ids(cache.tables_SB, row, tile, math_)
                for cache_ref, smem, loaded, released in (
                    (cache.k_NKbd, k_smem, k_loaded, k_released),
                    (cache.v_NKbd, v_smem, v_loaded, v_released),
                ):

                    @pl.when(use >= stages)
                    def _(released: Any = released) -> None:
                        plgpu.barrier_wait(released.at[slot])

                    fetch_tile(cache_ref, ids, kv_head, tile, smem.at[slot], loaded.at[slot], math_)

            lax.fori_loop(first, end, load, None)
            return before + (end - first)

        total = walk(item)

        def drain(use: jax.Array, _: None) -> None:
            slot = lax.rem(use, jnp.int32(slots))
            plgpu.barrier_wait(k_released.at[slot])
            plgpu.barrier_wait(v_released.at[slot])

        lax.fori_loop(jnp.maximum(total - slots, 0), total, drain, None)
