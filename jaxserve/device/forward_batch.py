"""The batch as the compiled step sees it: the only attention metadata there is.

Shape letters, used in every array name of this package: T tokens, S sequences (rows), B block-table width, N blocks in
the cache, b tokens a block holds, L layers, D hidden width, H query heads, K KV heads, d head size, V vocabulary,
R rows of per-request state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.layout import places, unpack


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """What each row's next token is drawn by; see `SamplingParams` and `batch.flags`.

    Attributes:
      state_rows_S: int32, row of the per-request device state; padding rows name the spare one.
      positions_S: int32, position the sampled token will take; folded into the row's random key. 0 for rows that do
        not sample.
      seeds_S2: uint32, (high, low) words of the request's seed.
      flags_S: int32, bits of `RowFlag`.
      draft_indices_S: int32, how many drafts of its request come up to and including this row's token: 0 where that
        is known; then 1, 2, ... in the rows behind it.
      draft_ids_S: int32, the row's token where it is a draft; 0 elsewhere.
      top_k_S: int32, 0 keeps all.
      temperature_S .. repetition_penalty_S: float32.
    """

    state_rows_S: jax.Array
    positions_S: jax.Array
    seeds_S2: jax.Array
    flags_S: jax.Array
    draft_indices_S: jax.Array
    draft_ids_S: jax.Array
    top_k_S: jax.Array
    temperature_S: jax.Array
    top_p_S: jax.Array
    min_p_S: jax.Array
    presence_penalty_S: jax.Array
    frequency_penalty_S: jax.Array
    repetition_penalty_S: jax.Array

    @classmethod
    def structure(cls) -> SamplingRows:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        return cls(*(leaf for _ in dataclasses.fields(cls)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """One packed batch; all int32.

    Attributes:
      token_ids_T, positions_T: padding tokens are id 0 at position 0. 0 also stands for the one token of a row with
        RowFlag.CONTINUES.
      slot_mapping_T: where each token's keys and values go: block id * b + offset. Padding goes to block 0.
      target_ids_T: the prompt token after each token, where prompt logprobs are wanted.
      block_tables_SB: 0 past a sequence's end.
      seq_lens_S: tokens in the cache once this batch's are written; 0 for padding rows.
      cu_q_lens: [S + 1]; constant past num_seqs.
      logits_indices_S: the token whose hidden state yields row s's logits.
      num_decodes, num_seqs: scalars; the first num_decodes sequences have one token each.
      flags: scalar, bits of `BatchFlag`.
      sampling: how rows sample.
    """

    token_ids_T: jax.Array
    positions_T: jax.Array
    slot_mapping_T: jax.Array
    target_ids_T: jax.Array
    block_tables_SB: jax.Array
    seq_lens_S: jax.Array
    cu_q_lens: jax.Array
    logits_indices_S: jax.Array
    num_decodes: jax.Array
    num_seqs: jax.Array
    flags: jax.Array
    sampling: SamplingRows

    @classmethod
    def structure(cls) -> ForwardBatch:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        arrays = {field.name: leaf for field in dataclasses.fields(cls)}
        return cls(**{**arrays, "sampling": SamplingRows.structure()})


def unpack_batch(packed: jax.Array, bucket: Bucket) -> ForwardBatch:
    """The int32 vector of `batch.layout` as a ForwardBatch (inside the compiled step)."""
    layout = places(bucket)
    array = unpack(packed, layout)
    for place in layout:
        if place.field.is_float:
            name = place.field.name
            array[name] = jax.lax.bitcast_convert_type(array[name], jnp.float32)
    seeds = jnp.stack([array["seed_high"], array["seed_low"]], axis=1)
    return ForwardBatch(
        token_ids_T=array["token_ids"],
        positions_T=array["positions"],
        slot_mapping_T=array["slot_mapping"],
        target_ids_T=array["target_ids"],
        block_tables_SB=array["block_tables"],
        seq_lens_S=array["seq_lens"],
        cu_q_lens=array["cu_q_lens"],
        logits_indices_S=array["logits_indices"],
        num_decodes=array["num_decodes"],
        num_seqs=array["num_seqs"],
        flags=array["batch_flags"],
        sampling=SamplingRows(
            state_rows_S=array["state_rows"],
            positions_S=array["sample_positions"],
            seeds_S2=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
            flags_S=array["row_flags"],
            draft_indices_S=array["draft_indices"],
            draft_ids_S=array["draft_ids"],
            top_k_S=array["top_k"],
            temperature_S=array["temperature"],
            top_p_S=array["top_p"],
            min_p_S=array["min_p"],
            presence_penalty_S=array["presence_penalty"],
            frequency_penalty_S=array["frequency_penalty"],
            repetition_penalty_S=array["repetition_penalty"],
        ),
    )
