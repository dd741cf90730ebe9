"""Which query rows each prefill tile works on: a batch's chunks cut into tiles of at most `rows` query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillTiles:
    """The tiles of a batch, for as many (M) as its shape can have; the first `count` are real. All int32.

    Attributes:
      owner_M: the tile's sequence.
      start_M: its first row in the packed batch.
      position_M: that row's position in the sequence.
      rows_M: its real rows, 0 for a tile that is not real.
      count: scalar.
    """

    owner_M: jax.Array
    start_M: jax.Array
    position_M: jax.Array
    rows_M: jax.Array
    count: jax.Array


def cut_chunks(
    *,
    num_tokens: int,
    rows: int,
    seq_lens_S: jax.Array,
    cu_q_lens: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
) -> PrefillTiles:
    """Tiles of every sequence from `num_decodes` on, none of which spans two sequences.

    Args:
      num_tokens: T, static; rows: query tokens a tile holds, static. The rest as in `api.ragged_paged_attention`.
    """
    num_sequences = seq_lens_S.shape[0]
    sequence = lax.iota(jnp.int32, num_sequences)
    q_len_S = jnp.where((sequence >= num_decodes) & (sequence < num_seqs), cu_q_lens[1:] - cu_q_lens[:-1], 0)
    tiles_S = lax.div(q_len_S + (rows - 1), rows)
    tiles_end_S = jnp.cumsum(tiles_S)
    most_tiles = min(num_tokens, num_sequences + num_tokens // rows)
    tile_M = lax.iota(jnp.int32, most_tiles)
    owner_M = jnp.minimum((tile_M[:, None] >= tiles_end_S).sum(-1, dtype=jnp.int32), num_sequences - 1)
    offset_M = (tile_M - (tiles_end_S - tiles_S)[owner_M]) * rows
    return PrefillTiles(
        owner_M=owner_M,
        start_M=cu_q_lens[owner_M] + offset_M,
        position_M=(seq_lens_S - q_len_S)[owner_M] + offset_M,
        rows_M=jnp.where(tile_M < tiles_end_S[-1], jnp.minimum(q_len_S[owner_M] - offset_M, rows), 0),
        count=tiles_end_S[-1],
    )
