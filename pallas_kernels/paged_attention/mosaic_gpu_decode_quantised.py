"""Decode attention over an int8 or fp8 cache, for Hopper: the kernel that `mosaic_gpu_decode` launches for one.

Warpgroups work in pairs, each of which walks the list of work items as a program of the other kernel does: one
computes, one brings it tiles (`mosaic_gpu_dequantise`) and runs ahead, into the next item too. Two pairs share an SM,
in one thread block, so that those that compute can have more of its registers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_dequantise import (
    Supply,
    bring_tiles,
    drain,
    raw_smem,
    scales_smem,
)
from pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    COMPILER_PARAMS,
    ROWS,
    PagedCache,
    TileMath,
    add_values,
    interpret_argument,
    new_carry,
    score_tile,
    softmax_step,
    visible_to_newest,
)

_BLOCKS = 132  # one for each SM of an H100 or H200
_BLOCKS_INTERPRETED = 2
_PAIRS = 2
# Registers of a thread that computes and of one that brings tiles, of the 128 for each that a block of this size starts
# with: what compiles without spills.
_REGISTERS = (160, 96)
_REGISTERS_SOFT_CAP = (176, 80)


def attend_quantised_splits(
    q_SKGd: jax.Array,
    cache: PagedCache,
    items_W5: jax.Array,
    count_1: jax.Array,
    max_splits: int,
    *,
    stages: int,
    math_: TileMath,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each split leaves (see `split_k`).

    Args:
      q_SKGd: queries, the group padded to a multiple of 8.
      items_W5, count_1: see `mosaic_gpu_decode.decode_rows`.
      stages: tiles on their way to each pair.

    Returns:
      float32 (partial [C, S, K, G, d], peak [C, S, K, G], total [C, S, K, G]).
    """
    num_rows, num_kv_heads, group, head_dim = q_SKGd.shape
    per_row = (max_splits, num_rows, num_kv_heads, group)
    landed = plgpu.Barrier(num_arrivals=math_.blocks_per_tile, num_barriers=_PAIRS * stages)
    handed = plgpu.Barrier(num_barriers=_PAIRS)

    def paged_decode(*refs: Any) -> None:
        _run_block(refs, stages, math_)

    return plgpu.kernel(
        paged_decode,
        out_type=[
            jax.ShapeDtypeStruct((*per_row, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.float32),
        ],
        grid=(_BLOCKS_INTERPRETED if math_.interpret else _BLOCKS,),
        grid_names=("block",),
        num_threads=2 * _PAIRS,
        thread_name="warpgroup",
        scratch_types=[
            math_.smem(_PAIRS, ROWS, head_dim),
            raw_smem(math_, _PAIRS, stages),
            raw_smem(math_, _PAIRS, stages),
            scales_smem(math_, _PAIRS, stages + 1),
            # The result leaves through the memory that the last tile stood in.
            plgpu.RefUnion(
                math_.tiles_smem(_PAIRS),
                (
                    math_.smem(_PAIRS, ROWS, head_dim, dtype="float32"),
                    plgpu.SMEM((_PAIRS, ROWS), jnp.float32),
                    plgpu.SMEM((_PAIRS, ROWS), jnp.float32),
                ),
            ),
            math_.weights_smem(_PAIRS),
            plgpu.Barrier(num_barriers=_PAIRS),
            landed,
            landed,
            handed,
            handed,
            handed,
            handed,
        ],
        compiler_params=COMPILER_PARAMS,
        **interpret_argument(math_.interpret),
    )(q_SKGd, *cache.operands(math_), items_W5, count_1)


def _run_block(refs: tuple[Any, ...], stages: int, math_: TileMath) -> None:
    """The kernel's body."""
    q_ref, *cache_refs, item_ref, count_ref = refs[:8]
    (partial_ref, peak_ref, total_ref, q_smem, k_raw, v_raw, scales, union, weights_smem, *barriers) = refs[
        8:
    ]
    (q_barrier, k_landed, v_landed, k_ready, v_ready, k_released, v_released) = barriers
    (k_tile, v_tile), (out_smem, peak_smem, total_smem) = union
    num_kv_heads, group = q_ref.shape[1:3]
    computing_registers, bringing_registers = _REGISTERS if math_.soft_cap is None else _REGISTERS_SOFT_CAP
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.rem(warpgroup, jnp.int32(_PAIRS))
    program = lax.axis_index("block") * _PAIRS + pair
    num_programs = lax.axis_size("block") * _PAIRS
    count = count_ref[0] * num_kv_heads
    mine = lax.div(jnp.maximum(count - program, 0) + (num_programs - 1), jnp.int32(num_programs))
    cache = PagedCache.from_refs(cache_refs)
    supply = Supply(
        stages=stages,
        raw=(k_raw.at[pair], v_raw.at[pair]),
        landed=(k_landed, v_landed),
        first_landed=pair * stages,
        scales=scales.at[pair],
        tile=(k_tile.at[pair], v_tile.at[pair]),
        ready=(k_ready.at[pair], v_ready.at[pair]),
        released=(k_released.at[pair], v_released.at[pair]),
    )

    def locate(index: jax.Array) -> tuple[jax.Array, ...]:
        """The index-th item of this pair -> (KV head, row, split, first tile, end tile, length)."""
        number = program + index * num_programs
        entry = lax.div(number, jnp.int32(num_kv_heads))
        return (lax.rem(number, jnp.int32(num_kv_heads)), *(item_ref[entry, j] for j in range(5)))

    @pl.when(warpgroup < _PAIRS)
    def _compute() -> None:
        plgpu.set_max_registers(computing_registers, action="increase")
        q = q_smem.at[pair]
        weights_of_pair = weights_smem.at[pair] if math_.interpret else None

        def item(index: jax.Array, before: jax.Array) -> jax.Array:
            kv_head, row, split, first, end, length = locate(index)
            plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q.at[pl.ds(0, group)], q_barrier.at[pair])
            plgpu.barrier_wait(q_barrier.at[pair])

            def step(tile: jax.Array, carry: Any) -> Any:
                is_last = tile == end - 1  # whose memory the result needs first
                plgpu.barrier_wait(supply.ready[0])
                scores = score_tile(q, supply.tile[0], math_)

                @pl.when(~is_last)
                def _() -> None:
                    plgpu.barrier_arrive(supply.released[0])

                visible = visible_to_newest(length - tile * math_.block_k, math_)
                scales_2k = supply.scales_of(before + (tile - first))
                weights, carry = softmax_step(scores, visible, carry, scales_2k, math_)
                plgpu.barrier_wait(supply.ready[1])
                carry = add_values(weights, supply.tile[1], carry, weights_of_pair, math_)

                @pl.when(~is_last)
                def _() -> None:
                    plgpu.barrier_arrive(supply.released[1])

                return carry

            acc, peak, total = lax.fori_loop(first, end, step, new_carry(math_))
            peak_smem.at[pair][...] = peak
            total_smem.at[pair][...] = total
            out_smem.at[pair][...] = acc
            plgpu.commit_smem()
            real = pl.ds(0, group)
            plgpu.copy_smem_to_gmem(out_smem.at[pair, real], partial_ref.at[split, row, kv_head])
            plgpu.copy_smem_to_gmem(peak_smem.at[pair, real], peak_ref.at[split, row, kv_head])
            plgpu.copy_smem_to_gmem(total_smem.at[pair, real], total_ref.at[split, row, kv_head])
            plgpu.wait_smem_to_gmem(0)
            for released in supply.released:
                plgpu.barrier_arrive(released)
            return before + (end - first)

        lax.fori_loop(0, mine, item, jnp.int32(0))

    @pl.when(warpgroup >= _PAIRS)
    def _bring() -> None:
        plgpu.set_max_registers(bringing_registers, action="decrease")

        def item(index: jax.Array, before: jax.Array) -> jax.Array:
            kv_head, row, _, first, end, length = locate(index)
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

        drain(supply, lax.fori_loop(0, mine, item, jnp.int32(0)))
