"""What the Mosaic GPU decode and prefill kernels share: reading tiles of the paged cache, and one online-softmax step.

A tile is `block_k` context tokens of one KV head. All arithmetic on scores is float32 in units of log2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # matrix rows of one wgmma
_LOG2E = math.log2(math.e)
_UNSEEN = -1e30  # the peak of a row that has seen nothing; far above the -inf of masked scores

COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    approx_math=True,
    reduction_scratch_bytes=0,  # rows are reduced inside a warp
)
INTERPRET_PARAMS = plgpu.InterpretGPUParams()  # a test replaces it, to search for races

Carry = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class PagedCache:
    """Arguments of `api.ragged_paged_attention`, as arrays or, in a kernel, as references to them."""

    k_NKbd: Any
    v_NKbd: Any
    k_scale: Any
    v_scale: Any
    tables_SB: Any

    def operands(self, math_: TileMath) -> list[jax.Array]:
        """What a kernel gets of it; the tables are widened so that every tile finds an entry for each of its blocks."""
        extra = -self.tables_SB.shape[1] % math_.blocks_per_tile
        tables = jnp.pad(self.tables_SB, ((0, 0), (0, extra))) if extra else self.tables_SB
        scales = [self.k_scale, self.v_scale] if math_.is_quantised else []
        return [self.k_NKbd, self.v_NKbd, *scales, tables]

    @staticmethod
    def from_refs(refs: list[Any]) -> PagedCache:
        """From references to the operands."""
        k_ref, v_ref, *scales, table_ref = refs
        k_scale, v_scale = scales or (None, None)
        return PagedCache(k_ref, v_ref, k_scale, v_scale, table_ref)


@dataclass(frozen=True)
class TileMath:
    """The static side of a kernel's arithmetic.

    Attributes:
      head_dim: d; block_k: tokens a tile holds; block_size: tokens a block of the cache holds.
      dtype: of queries; kv_dtype: of the cache.
      scale, soft_cap, sliding_window: as in `api.ragged_paged_attention`.
      interpret: use only what the interpreter knows: it takes the left side of wgmma from shared memory, and no
        accumulator that holds something already.
    """

    head_dim: int
    block_k: int
    block_size: int
    dtype: str
    kv_dtype: str
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    interpret: bool

    @property
    def blocks_per_tile(self) -> int:
        return max(1, self.block_k // self.block_size)

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def value_dtype(self) -> str:
        """What weights and values are multiplied in. A quantised cache's weights carry its scales, whose small products
        float16 can't hold; bfloat16 can, and holds every int8 and fp8 number exactly."""
        return "bfloat16" if self.is_quantised else self.dtype

    def smem(self, *shape: int, dtype: str | None = None, most: int = 128) -> Any:
        """Shared memory in the swizzled layout that TMA and wgmma ask for: rows are cut into pieces of up to `most`
        bytes."""
        dtype = dtype or self.dtype
        width = jnp.dtype(dtype).itemsize
        swizzle = next(size for size in (128, 64, 32) if size <= most and shape[-1] * width % size == 0)
        tiling = plgpu.TilingTransform((8, swizzle // width))  # type: ignore[abstract]
        swizzling = plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=(tiling, swizzling))

    def tiles_smem(self, *lead: int) -> tuple[Any, Any]:
        """Shared memory for tiles of keys and of values, as wgmma takes them."""
        shape = (*lead, self.block_k, self.head_dim)
        # wgmma sums over the rows of values in steps of a piece's width.
        most = self.block_k * jnp.dtype(self.value_dtype).itemsize
        return self.smem(*shape), self.smem(*shape, dtype=self.value_dtype, most=most)

    def weights_smem(self, *lead: int) -> Any:
        """Where the interpreted form keeps softmax weights."""
        return self.smem(*lead, ROWS, self.block_k, dtype=self.value_dtype) if self.interpret else None


def interpret_argument(interpret: bool) -> dict[str, Any]:
    """Keyword of `plgpu.kernel` that runs it on the CPU."""
    return {"interpret": INTERPRET_PARAMS} if interpret else {}


def read_block_ids(table_ref: Any, row: jax.Array, tile: jax.Array, math_: TileMath) -> list[jax.Array]:
    """The block ids of a tile. Loaded apart from `fetch_tile`, so that their latency passes behind other work."""
    if math_.block_k >= math_.block_size:
        return [table_ref[row, tile * math_.blocks_per_tile + j] for j in range(math_.blocks_per_tile)]
    return [table_ref[row, lax.div(tile, jnp.int32(math_.block_size // math_.block_k))]]


def fetch_tile(
    cache_ref: Any,
    block_ids: list[jax.Array],
    kv_head: jax.Array,
    tile: jax.Array,
    tile_smem: Any,
    barrier: Any,
    math_: TileMath,
) -> None:
    """Start the TMA copies of one tile into `tile_smem` [block_k, d]; `barrier` counts one arrival for each block."""
    if math_.block_k < math_.block_size:
        start = lax.rem(tile, jnp.int32(math_.block_size // math_.block_k)) * math_.block_k
        part = cache_ref.at[block_ids[0], kv_head, pl.ds(start, math_.block_k)]
        plgpu.copy_gmem_to_smem(part, tile_smem, barrier)
        return
    for j, block in enumerate(block_ids):
        rows = tile_smem.at[pl.ds(j * math_.block_size, math_.block_size)]
        plgpu.copy_gmem_to_smem(cache_ref.at[block, kv_head], rows, barrier)


def new_carry(math_: TileMath) -> Carry:
    """(weighted sum of values [64, d], peak [64], total [64]) before the first tile."""
    row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.full((ROWS, math_.head_dim), 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), _UNSEEN, jnp.float32), row),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row),
    )


def score_tile(q_smem: Any, k_smem: Any, math_: TileMath) -> jax.Array:
    """q . k, float32 [64, block_k], unscaled."""

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, q_smem, k_smem.T)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, math_.block_k), jnp.float32))


def softmax_step(
    scores: jax.Array, visible: jax.Array | None, carry: Carry, scales_smem: Any, math_: TileMath
) -> tuple[jax.Array, Carry]:
    """(weights [64, block_k] in `value_dtype`, the carry scaled to the new peak and with the weights in its total).

    A row whose tile is fully masked keeps its carry, bit for bit: its peak stays, and exp2(-inf) is 0.

    Args:
      scales_smem: float32 [2, block_k], the scales of the tile's keys and of its values, which the weights take over;
        None unless the cache is quantised.
    """
    acc, peak, total = carry
    if scales_smem is not None:
        scores = scores * _columns(scales_smem.at[0])
    scores, unit = _scaled(scores, math_)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(axis=1) * unit)
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    total = total * decay + weights.sum(axis=1)
    if scales_smem is not None:
        weights = weights * _columns(scales_smem.at[1])
    # The registers of the float32 weights are wanted for what follows.
    rounded, total, decay = lax.optimization_barrier((weights.astype(math_.value_dtype), total, decay))
    return rounded, (acc * lax.broadcast_in_dim(decay, acc.shape, [0]), new_peak, total)


def _columns(scale_smem: Any) -> jax.Array:
    """A factor for each column of a tile of scores, [64, block_k]."""
    scale = plgpu.load(scale_smem, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(scale, (ROWS, *scale.shape), [1])


def _scaled(scores: jax.Array, math_: TileMath) -> tuple[jax.Array, float]:
    """(scores, unit): their product is in log2. A positive scale is left for the subtraction of the peak to absorb."""
    if math_.soft_cap is not None:
        # cap * tanh(x) as cap - 2 cap / (1 + e^2x): the hardware's approximate tanh errs by 5e-4 of the cap.
        cap = math_.soft_cap * _LOG2E
        doubled = jnp.exp2(scores * (2 * _LOG2E * math_.scale / math_.soft_cap))
        return cap - (2 * cap) / (1 + doubled), 1.0
    if math_.scale <= 0:
        return scores * (math_.scale * _LOG2E), 1.0
    return scores, math_.scale * _LOG2E


def add_values(
    weights: jax.Array,
    v_smem: Any,
    carry: Carry,
    weights_smem: Any,
    math_: TileMath,
) -> Carry:
    """The carry with weights . v added."""
    acc, peak, total = carry
    if math_.interpret:
        weights_smem[...] = weights
        plgpu.commit_smem()

        def product(acc_ref: Any) -> jax.Array:
            plgpu.wgmma(acc_ref, weights_smem, v_smem)
            return acc_ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC((ROWS, math_.head_dim), jnp.float32)), peak, total

    def accumulate(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, weights, v_smem)

    return pl.run_state(accumulate)(plgpu.ACC.init(acc)), peak, total


def clear_unfilled(v_smem: Any, filled: jax.Array, math_: TileMath) -> None:
    """Zero the tile's values from row `filled` on: they may be NaN, and 0 * NaN is NaN. Ends with a commit."""
    # Piecewise, as registers are scarce here. A tile of 32 rows is too short for wgmma's layout, but not across.
    across = math_.block_k < ROWS
    height = min(math_.block_k, ROWS)
    width = 64 if math_.head_dim % 64 == 0 else 32
    layout = plgpu.Layout.WGMMA_TRANSPOSED if across else plgpu.Layout.WGMMA
    for row in range(0, math_.block_k, height):
        for column in range(0, math_.head_dim, width):
            piece = v_smem.at[pl.ds(row, height), pl.ds(column, width)]
            piece = piece.T if across else piece
            values = plgpu.load(piece, layout=layout)
            rows = plgpu.broadcasted_iota(jnp.int32, values.shape, int(across), layout=layout)
            piece[...] = jnp.where(rows + row < filled, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def visible_to_newest(filled: jax.Array, math_: TileMath) -> jax.Array:
    """bool [64, block_k]: what a sequence's newest token sees of a tile, whose tokens from `filled` on are not its."""
    key = tile_iota(1, math_)
    visible = key < filled
    if math_.sliding_window is not None:
        visible &= key >= filled - math_.sliding_window
    return visible


def tile_iota(axis: int, math_: TileMath) -> jax.Array:
    """int32 [64, block_k]: the index along an axis of a tile of scores."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, math_.block_k), axis, layout=plgpu.Layout.WGMMA)
