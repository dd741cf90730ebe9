"""Flash-decoding: how a decode row's context is cut into splits.

A row's cut depends on that row's own length and on constants, never on its batch mates or on the bucket. A kernel of
each backend makes one of the splits' results, in an order that static sizes fix: a row's bits are the same in any
company. A split leaves its weighted sum of values, not divided (partial), its largest score in log2 units (peak), and
its sum of exp2(score - peak) (total). What stands beyond a row's own number of splits may be anything, NaN included.

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
