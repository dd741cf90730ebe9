"""Flash-decoding: how a decode row's context is cut into splits, and how their partial results become one.

A row's cut depends on that row's own length and on constants, never on its batch mates or on the bucket, and partial
results are added in the order of the splits: the row's bits are the same in any company.

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/); online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Splits:
    """The cut of every row, in tiles of `block_k` context tokens. All int32 [S].

    Attributes:
      first_tile: the first tile that the row sees (not 0 under a sliding window).
      end_tile: one past the last.
      tiles_per_split: split c covers tiles first_tile + c * tiles_per_split on, up to end_tile.
      num_splits: splits that hold at least one tile; 0 for a padding row.
    """

    first_tile: jax.Array
    end_tile: jax.Array
    tiles_per_split: jax.Array
    num_splits: jax.Array


def cut_rows(
    seq_lens_S: jax.Array,
    *,
    block_k: int,
    split_tokens: int,
    max_splits: int,
    sliding_window: int | None,
) -> Splits:
    """See `Splits`. `seq_lens_S`: int32, 0 for a padding row."""
    end = lax.div(seq_lens_S + (block_k - 1), block_k)
    if sliding_window is None:
        first = jnp.zeros_like(end)
    else:
        first = lax.div(jnp.maximum(seq_lens_S - sliding_window, 0), block_k)
    tiles = end - first
    fewest = max(1, split_tokens // block_k)
    per_split = jnp.maximum(lax.div(tiles + (max_splits - 1), max_splits), fewest)
    return Splits(first, end, per_split, lax.div(tiles + (per_split - 1), per_split))


def combine(
    partial_CSHd: jax.Array, peak_CSH: jax.Array, total_CSH: jax.Array, num_splits_S: jax.Array
) -> jax.Array:
    """The rows' results from those of their splits.

    Args:
      partial_CSHd: float32; each split's weighted sum of values, not divided by `total`. What stands beyond a row's
        own number of splits may be anything, NaN included.
      peak_CSH: float32; each split's largest score, in units of log2.
      total_CSH: float32; each split's sum of exp2(score - peak).
      num_splits_S: int32.

    Returns:
      float32 [S, H, d]; 0 for rows without a split.
    """
    num_rows, num_heads, head_dim = partial_CSHd.shape[1:]
    acc = jnp.zeros((num_rows, num_heads, head_dim), jnp.float32)
    peak = jnp.full((num_rows, num_heads), -jnp.inf, jnp.float32)
    total = jnp.zeros((num_rows, num_heads), jnp.float32)
    for c in range(partial_CSHd.shape[0]):  # one after the other: the order of the sum is fixed
        real = (c < num_splits_S)[:, None]
        new_peak = jnp.where(real, jnp.maximum(peak, peak_CSH[c]), peak)
        decay = jnp.where(real & (peak > -jnp.inf), jnp.exp2(peak - new_peak), 1.0)
        weight = jnp.where(real, jnp.exp2(peak_CSH[c] - new_peak), 0.0)
        acc = acc * decay[..., None] + jnp.where(real[..., None], partial_CSHd[c] * weight[..., None], 0.0)
        total = total * decay + jnp.where(real, total_CSH[c] * weight, 0.0)
        peak = new_peak
    return acc / jnp.where(total > 0, total, 1.0)[..., None]
