"""Decode attention for Hopper: TMA brings tiles of the cache to shared memory, wgmma multiplies them.

One program is one warpgroup. A fixed number of programs walk a list of work items; an item is one split of one row's
context for one KV head. So a batch of short rows pays for no empty splits, whatever the largest number of splits. The
KV heads of a split are neighbours in the list: they read neighbouring memory at about the same time, and rows that
share a prefix find it in L2. The table's tile sizes keep shared memory under half an SM's, so that two programs fit
on an SM and one loads while the other computes.

The query heads of a group are the rows of a matrix of 64; the rest of it is wasted, which memory-bound work can
afford.

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/); FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import split_k
from pallas_kernels.paged_attention.mosaic_gpu_combine import combine_splits
from pallas_kernels.paged_attention.mosaic_gpu_decode_quantised import attend_quantised_splits
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
    visible_to_newest,
)

_PROGRAMS = 264  # two for each SM of an H100 or H200
_PROGRAMS_INTERPRETED = 3


def decode_rows(
    q_SHd: jax.Array,
    cache: PagedCache,
    seq_lens_S: jax.Array,
    *,
    stages: int,
    split_tokens: int,
    max_splits: int,
    math_: TileMath,
) -> jax.Array:
    """Attention of one query row for each sequence.

    Args:
      q_SHd: as in `api.paged_decode`.
      seq_lens_S: int32, 0 for a row to leave out.
      stages: tiles in flight; split_tokens, max_splits: see `split_k.cut_rows`.

    Returns:
      float32 [S, H, d]; 0 for rows left out.
    """
    num_rows, num_heads, head_dim = q_SHd.shape
    num_kv_heads = cache.k_NKbd.shape[1]
    group = num_heads // num_kv_heads
    padded_group = -(-group // 8) * 8  # swizzled shared memory is cut in slices of 8 rows
    splits = split_k.cut_rows(
        seq_lens_S,
        block_k=math_.block_k,
        split_tokens=split_tokens,
        max_splits=max_splits,
        sliding_window=math_.sliding_window,
    )
    items_W5, count_1 = _list_items(splits, seq_lens_S, max_splits)
    q_SKGd = jnp.pad(
        q_SHd.reshape(num_rows, num_kv_heads, group, head_dim),
        ((0, 0), (0, 0), (0, padded_group - group), (0, 0)),
    )
    attend = attend_quantised_splits if math_.is_quantised else _attend_splits
    partial, peak, total = attend(q_SKGd, cache, items_W5, count_1, max_splits, stages=stages, math_=math_)
    padded_heads = num_kv_heads * padded_group
    out_SPd = combine_splits(
        partial.reshape(max_splits, num_rows, padded_heads, head_dim),
        peak.reshape(max_splits, num_rows, padded_heads),
        total.reshape(max_splits, num_rows, padded_heads),
        splits.num_splits,
        interpret=math_.interpret,
    )
    out_SKGd = out_SPd.reshape(num_rows, num_kv_heads, padded_group, head_dim)[:, :, :group]
    return out_SKGd.reshape(num_rows, num_heads, head_dim)


def _list_items(
    splits: split_k.Splits, seq_lens_S: jax.Array, max_splits: int
) -> tuple[jax.Array, jax.Array]:
    """The real splits of all rows: (int32 [W, 5] of row, split, first tile, end tile, length; int32 [1], how many)."""
    num_rows = seq_lens_S.shape[0]
    ends_S = jnp.cumsum(splits.num_splits)
    item_W = lax.iota(jnp.int32, num_rows * max_splits)
    row_W = jnp.minimum((item_W[:, None] >= ends_S).sum(-1, dtype=jnp.int32), num_rows - 1)
    split_W = item_W - (ends_S - splits.num_splits)[row_W]
    first_W = splits.first_tile[row_W] + split_W * splits.tiles_per_split[row_W]
    end_W = jnp.minimum(first_W + splits.tiles_per_split[row_W], splits.end_tile[row_W])
    return jnp.stack([row_W, split_W, first_W, end_W, seq_lens_S[row_W]], axis=1), ends_S[-1:]


def _attend_splits(
    q_SKGd: jax.Array,
    cache: PagedCache,
    items_W5: jax.Array,
    count_1: jax.Array,
    max_splits: int,
    *,
    stages: int,
    math_: TileMath,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 (partial [C, S, K, G, d], peak [C, S, K, G], total [C, S, K, G]): what each split leaves."""
    num_rows, num_kv_heads, padded_group, head_dim = q_SKGd.shape
    per_row = (max_splits, num_rows, num_kv_heads, padded_group)
    tile_barrier = plgpu.Barrier(num_arrivals=math_.blocks_per_tile, num_barriers=stages)

    def paged_decode(*refs: Any) -> None:
        _walk_items(refs, num_kv_heads, padded_group, stages, math_)

    return plgpu.kernel(
        paged_decode,
        out_type=[
            jax.ShapeDtypeStruct((*per_row, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.float32),
            jax.ShapeDtypeStruct(per_row, jnp.float32),
        ],
        grid=(_PROGRAMS_INTERPRETED if math_.interpret else _PROGRAMS,),
        grid_names=("program",),
        scratch_types=[
            math_.smem(ROWS, head_dim),
            # The result leaves through the memory that the tiles came in by.
            plgpu.RefUnion(
                math_.tiles_smem(stages),
                (
                    math_.smem(ROWS, head_dim, dtype="float32"),
                    plgpu.SMEM((ROWS,), jnp.float32),
                    plgpu.SMEM((ROWS,), jnp.float32),
                ),
            ),
            math_.weights_smem(),
            plgpu.Barrier(),
            tile_barrier,
            tile_barrier,
        ],
        compiler_params=COMPILER_PARAMS,
        **interpret_argument(math_.interpret),
    )(q_SKGd, *cache.operands(math_), items_W5, count_1)


def _walk_items(
    refs: tuple[Any, ...], num_kv_heads: int, padded_group: int, stages: int, math_: TileMath
) -> None:
    """The kernel's body."""
    (q_ref, k_ref, v_ref, table_ref, item_ref, count_ref, partial_ref, peak_ref, total_ref, *scratch) = refs
    (q_smem, union, weights_smem, q_barrier, k_barrier, v_barrier) = scratch
    (k_smem, v_smem), (out_smem, peak_smem, total_smem) = union
    program = lax.axis_index("program")
    num_programs = lax.axis_size("program")
    count = count_ref[0] * num_kv_heads
    mine = lax.div(jnp.maximum(count - program, 0) + (num_programs - 1), jnp.int32(num_programs))

    def item(index: jax.Array, _: None) -> None:
        number = program + index * num_programs
        kv_head = lax.rem(number, jnp.int32(num_kv_heads))
        entry = lax.div(number, jnp.int32(num_kv_heads))
        row, split, first, end, length = (item_ref[entry, j] for j in range(5))
        tiles = end - first

        def fetch(cache_ref: Any, smem: Any, barrier: Any, i: jax.Array, ids: list[jax.Array]) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            fetch_tile(cache_ref, ids, kv_head, first + i, smem.at[slot], barrier.at[slot], math_)

        def ids_of(i: jax.Array) -> list[jax.Array]:
            return read_block_ids(table_ref, row, first + i, math_)

        plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q_smem.at[pl.ds(0, padded_group)], q_barrier)
        for i in range(stages):

            @pl.when(i < tiles)
            def _(i: jax.Array = jnp.int32(i)) -> None:
                ids = ids_of(i)
                fetch(k_ref, k_smem, k_barrier, i, ids)
                fetch(v_ref, v_smem, v_barrier, i, ids)

        plgpu.barrier_wait(q_barrier)

        def step(i: jax.Array, carry: Any) -> Any:
            slot = lax.rem(i, jnp.int32(stages))
            ahead = i + stages
            ids = ids_of(jnp.minimum(ahead, tiles - 1))
            plgpu.barrier_wait(k_barrier.at[slot])
            scores = score_tile(q_smem, k_smem.at[slot], math_)

            @pl.when(ahead < tiles)
            def _() -> None:
                fetch(k_ref, k_smem, k_barrier, ahead, ids)

            filled = length - (first + i) * math_.block_k
            weights, carry = softmax_step(scores, visible_to_newest(filled, math_), carry, None, math_)
            plgpu.barrier_wait(v_barrier.at[slot])

            @pl.when(filled < math_.block_k)
            def _() -> None:
                clear_unfilled(v_smem.at[slot], filled, math_)

            carry = add_values(weights, v_smem.at[slot], carry, weights_smem, math_)

            @pl.when(ahead < tiles)
            def _() -> None:
                fetch(v_ref, v_smem, v_barrier, ahead, ids)

            return carry

        acc, peak, total = lax.fori_loop(0, tiles, step, new_carry(math_))
        out_smem[...] = acc
        peak_smem[...] = peak
        total_smem[...] = total
        plgpu.commit_smem()
        real = pl.ds(0, padded_group)
        plgpu.copy_smem_to_gmem(out_smem.at[real], partial_ref.at[split, row, kv_head])
        plgpu.copy_smem_to_gmem(peak_smem.at[real], peak_ref.at[split, row, kv_head])
        plgpu.copy_smem_to_gmem(total_smem.at[real], total_ref.at[split, row, kv_head])
        plgpu.wait_smem_to_gmem(0)

    lax.fori_loop(0, mine, item, None)
