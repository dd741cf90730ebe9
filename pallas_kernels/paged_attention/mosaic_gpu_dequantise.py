"""Tiles of an int8 or fp8 cache on their way to wgmma, on Hopper: one warpgroup brings them for those that compute.

TMA copies a tile of one-byte numbers into shared memory; the warpgroup widens it to what wgmma multiplies (which is
exact) and writes it where that reads. The cache's scales don't touch the numbers: they travel beside the tile, a
float32 for each token, and multiply the scores (keys) and the softmax weights (values). So the rounding is that of a
16-bit cache.

While a tile is multiplied, the next one is widened; further ones are on their way by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_tiles import PagedCache, TileMath, fetch_tile, read_block_ids

_WIDEN_ROWS = 32  # at a time, as registers are scarce
_VECTOR = 8  # numbers that a thread widens at once


@dataclass(frozen=True)
class Supply:
    """What the warpgroup that brings tiles shares with those that compute. Of each pair, keys come first.

    Attributes:
      stages: tiles on their way.
      raw: [stages, block_k, d] twice, tiles as the cache holds them.
      landed: a barrier for each from index `first_landed` on, which TMA completes.
      scales: float32 [stages + 1, 2, block_k]; tile number n of the program has slot n % (stages + 1). One slot more
        than stages, for the last tile of one item is still worked on while the first of the next are on their way.
      tile: [block_k, d] twice, widened.
      ready: a barrier for each tile; completed when it may be multiplied (and its scales read).
      released: a barrier for each; completed by those that compute when it may be overwritten. The scales are given
        back with the values.
    """

    stages: int
    raw: tuple[Any, Any]
    landed: tuple[Any, Any]
    first_landed: jax.Array | int
    scales: Any
    tile: tuple[Any, Any]
    ready: tuple[Any, Any]
    released: tuple[Any, Any]

    def scales_of(self, number: jax.Array) -> Any:
        """The scales of the program's tile of that number, [2, block_k]."""
        return self.scales.at[lax.rem(number, jnp.int32(self.stages + 1))]


def raw_smem(math_: TileMath, *lead: int) -> Any:
    """Shared memory for tiles as the cache holds them."""
    return math_.smem(*lead, math_.block_k, math_.head_dim, dtype=math_.kv_dtype)


def scales_smem(math_: TileMath, *lead: int) -> Any:
    """Shared memory for the scales of tiles; `lead` ends with stages + 1."""
    return plgpu.SMEM((*lead, 2, math_.block_k), jnp.float32)


def bring_tiles(
    supply: Supply,
    cache: PagedCache,
    *,
    row: jax.Array,
    kv_head: jax.Array,
    first: jax.Array | int,
    end: jax.Array,
    length: jax.Array,
    before: jax.Array,
    math_: TileMath,
) -> jax.Array:
    """Bring tiles [first, end) of a sequence.

    Args:
      row: of the block tables; length: of the sequence, in tokens.
      before: tiles that the program has brought so far.

    Returns:
      That, with these.
    """
    stages, tiles = supply.stages, end - first

    def ids_of(i: jax.Array) -> list[jax.Array]:
        return read_block_ids(cache.tables_SB, row, first + i, math_)

    def fetch(which: int, i: jax.Array, ids: list[jax.Array]) -> None:
        slot = lax.rem(before + i, jnp.int32(stages))
        of_cache = (cache.k_NKbd, cache.v_NKbd)[which]
        landed = supply.landed[which].at[supply.first_landed + slot]
        fetch_tile(of_cache, ids, kv_head, first + i, supply.raw[which].at[slot], landed, math_)

    def note_scales(i: jax.Array, ids: list[jax.Array]) -> None:
        filled = length - (first + i) * math_.block_k
        slot = supply.scales_of(before + i)
        for which, scale in enumerate((cache.k_scale, cache.v_scale)):
            slot.at[which][...] = _spread(scale, ids, kv_head, filled, math_)

    def begin(i: jax.Array, _: None) -> None:
        ids = ids_of(i)
        fetch(0, i, ids)
        fetch(1, i, ids)

    begun = jnp.minimum(tiles, stages)
    lax.fori_loop(0, begun, begin, None)
    lax.fori_loop(0, begun, lambda i, _: note_scales(i, ids_of(i)), None)

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(before + i, jnp.int32(stages))
        ahead = i + stages
        ids = ids_of(jnp.minimum(ahead, tiles - 1))
        for which in range(2):
            plgpu.barrier_wait(supply.landed[which].at[supply.first_landed + slot])

            @pl.when(before + i > 0)
            def _(which: int = which) -> None:
                plgpu.barrier_wait(supply.released[which])

            # Unfilled values may be NaN, and 0 * NaN is NaN; unfilled keys are masked, and int8 knows no NaN.
            filled = length - (first + i) * math_.block_k if which and math_.kv_dtype != "int8" else None
            _widen(supply.raw[which].at[slot], supply.tile[which], filled, math_)
            plgpu.barrier_arrive(supply.ready[which])

            @pl.when(ahead < tiles)
            def _(which: int = which) -> None:
                fetch(which, ahead, ids)

        @pl.when(ahead < tiles)
        def note() -> None:
            note_scales(ahead, ids)

    lax.fori_loop(0, tiles, step, None)
    return before + tiles


def drain(supply: Supply, brought: jax.Array) -> None:
    """Wait until the last of all tiles is given back: no barrier may be left half-way."""

    @pl.when(brought > 0)
    def _() -> None:
        for released in supply.released:
            plgpu.barrier_wait(released)


def _spread(
    scale_ref: Any, block_ids: list[jax.Array], kv_head: jax.Array, filled: jax.Array, math_: TileMath
) -> jax.Array:
    """float32 [block_k]: each token's scale; 0 from `filled` on, where a block's scale may be NaN."""
    num_blocks, num_kv_heads = scale_ref.shape
    head = kv_head if num_kv_heads > 1 else 0
    tiling = plgpu.Tiling(((32,), (1,)))
    # Each warp writes all of it, a number a thread.
    layout = plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(times=4),), lane_dims=(-2,), vector_dim=-1
    )
    token = plgpu.broadcasted_iota(jnp.int32, (math_.block_k,), 0, layout=layout)
    first, *others = [scale_ref[block, head] for block in (block_ids if num_blocks > 1 else [0])]
    spread = plgpu.layout_cast(jnp.full((math_.block_k,), first, jnp.float32), layout)
    for j, value in enumerate(others, start=1):
        spread = jnp.where(token >= j * math_.block_size, value, spread)
    return jnp.where(token < filled, spread, 0.0)


def _widen(raw_smem: Any, tile_smem: Any, filled: jax.Array | None, math_: TileMath) -> None:
    """A tile of the cache in the dtype of `tile_smem`, there; 0 from row `filled` on. Ends with a commit."""
    layout = _layout(math_)
    for row in range(0, math_.block_k, _WIDEN_ROWS):
        piece = pl.ds(row, _WIDEN_ROWS)
        numbers = plgpu.load(raw_smem.at[piece], layout=layout)
        if math_.kv_dtype != "int8":
            # No instruction makes bfloat16 of fp8.
            numbers = numbers.astype(jnp.float16).astype(jnp.float32)
        numbers = numbers.astype(tile_smem.dtype)
        if filled is not None:
            rows = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=layout)
            numbers = jnp.where(rows + row < filled, numbers, jnp.zeros_like(numbers))
        tile_smem.at[piece][...] = numbers
    plgpu.commit_smem()


def _layout(math_: TileMath) -> Any:
    """Which thread widens what: neighbours along a row of a swizzled piece, as far as it goes, so that a warp finds
    every bank of shared memory free."""
    width = next(size for size in (128, 64, 32) if math_.head_dim % size == 0)
    rows = 32 * _VECTOR // width  # of a warp
    tiling = plgpu.Tiling(((4 * rows, width), (rows, width), (_VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
