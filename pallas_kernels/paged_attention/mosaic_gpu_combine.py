"""The parts of a decode row's context made one, on Hopper. No split that a row lacks is read.

XLA computes the small arrays (a number for each split and head): each split's share of the result. The kernel adds up
the large ones, split after split: the order of the sum is that of the splits, for every shape of the batch.

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_tiles import COMPILER_PARAMS, interpret_argument

_THREADS = 128  # of a warpgroup


def combine_splits(
    partial_CSPd: jax.Array,
    peak_CSP: jax.Array,
    total_CSP: jax.Array,
    num_splits_S: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """The rows' results from those of their splits.

    Args:
      partial_CSPd, peak_CSP, total_CSP: float32, see `split_k`; P heads, P * d is a multiple of 128.
      num_splits_S: int32.

    Returns:
      float32 [S, P, d]; 0 for rows without a split.
    """
    max_splits, num_rows, num_heads, head_dim = partial_CSPd.shape
    share_CSP = _shares(peak_CSP, total_CSP, num_splits_S)
    heads = _THREADS // math.gcd(_THREADS, head_dim)  # the fewest that fill a vector of all threads
    width = heads * head_dim
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)

    def combine(partial_ref: Any, share_ref: Any, splits_ref: Any, out_ref: Any) -> None:
        row, piece = lax.axis_index("row"), lax.axis_index("piece")

        def add(c: jax.Array, acc: jax.Array) -> jax.Array:
            part = plgpu.load(partial_ref.at[c, row, piece], layout=layout, optimized=False)
            share = jnp.full((width,), share_ref[c, row, piece, 0], jnp.float32)
            for head in range(1, heads):
                of_head = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) >= head * head_dim
                share = jnp.where(of_head, share_ref[c, row, piece, head], share)
            return acc + part * share

        nothing = plgpu.layout_cast(jnp.full((width,), 0, jnp.float32), layout)
        out_ref[row, piece] = lax.fori_loop(0, splits_ref[row], add, nothing)

    pieces = num_heads // heads
    out = plgpu.kernel(
        combine,
        out_type=jax.ShapeDtypeStruct((num_rows, pieces, width), jnp.float32),
        grid=(num_rows, pieces),
        grid_names=("row", "piece"),
        compiler_params=COMPILER_PARAMS,
        **interpret_argument(interpret),
    )(
        partial_CSPd.reshape(max_splits, num_rows, pieces, width),
        share_CSP.reshape(max_splits, num_rows, pieces, heads),
        num_splits_S,
    )
    return out.reshape(num_rows, num_heads, head_dim)


def _shares(peak_CSP: jax.Array, total_CSP: jax.Array, num_splits_S: jax.Array) -> jax.Array:
    """[C, S, P]: what each split's partial result is multiplied by; 0 where there is no such split."""
    max_splits = peak_CSP.shape[0]
    real = (lax.iota(jnp.int32, max_splits)[:, None] < num_splits_S)[..., None]
    peak = jnp.where(real, peak_CSP, -jnp.inf)
    weight = jnp.where(real, jnp.exp2(peak - peak.max(0)), 0.0)
    # The barrier keeps product and sum apart: whether a compiler fuses them would change bits with the shape.
    sums = lax.optimization_barrier(jnp.where(real, total_CSP * weight, 0.0))
    while len(sums) > 1:  # halves added to each other: a fixed order, whatever the shape
        half = -(-len(sums) // 2)
        rest = jnp.pad(sums[half:], ((0, 2 * half - len(sums)), (0, 0), (0, 0)))
        sums = sums[:half] + rest
    return weight / jnp.where(sums > 0, sums, 1.0)
