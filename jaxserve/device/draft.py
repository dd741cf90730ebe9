"""Drafting on the device: a small model says what may come next, token by token. Pure.

The batch is an ordinary one whose rows have one token each, the last known one. Each round runs the draft over
these tokens, and draws the next with the target's own settings, keys and noise (Gumbel coupling, arXiv 2408.07978):
the more alike the two distributions, the more often both draw the same token.

The target's first layers may have an exit above them (`models.exit`). It continues from the final hidden state behind
each request's last token but one, so these are kept by slot (`observe_step`), and from its own guesses of further ones.

Like a step (`device.step`), drafting runs as a program for each part, or all in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxserve.batch.bucket import Bucket
from jaxserve.device.forward_batch import ForwardBatch, unpack_batch
from jaxserve.device.kv_cache import KVCache
from jaxserve.device.sampling import SamplingState, sample
from jaxserve.device.step import begin_step, keep_last, layer_step, run_layers
from jaxserve.device.step_parts import StepModel, StepParams
from jaxserve.device.verification import accepted_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftParams(StepParams):
    """Those of what drafts.

    Attributes:
      exit: of the exit, if there is one.
    """

    exit: nnx.State | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moving:
    """What changes in a batch from one draft token to the next; see `ForwardBatch` and `SamplingRows`."""

    token_ids_T: jax.Array
    positions_T: jax.Array
    slot_mapping_T: jax.Array
    seq_lens_S: jax.Array
    sample_positions_S: jax.Array

    @classmethod
    def of(cls, batch: ForwardBatch) -> Moving:
        return cls(
            batch.token_ids_T,
            batch.positions_T,
            batch.slot_mapping_T,
            batch.seq_lens_S,
            batch.sampling.positions_S,
        )

    @classmethod
    def structure(cls) -> Moving:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        return cls(leaf, leaf, leaf, leaf, leaf)

    def put_into(self, batch: ForwardBatch) -> ForwardBatch:
        return dataclasses.replace(
            batch,
            token_ids_T=self.token_ids_T,
            positions_T=self.positions_T,
            slot_mapping_T=self.slot_mapping_T,
            seq_lens_S=self.seq_lens_S,
            sampling=dataclasses.replace(batch.sampling, positions_S=self.sample_positions_S),
        )


@dataclass(frozen=True)
class ForwardParts:
    """As those of `StepParts`."""

    begin: Callable[..., Any]
    layers: tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class DraftParts(ForwardParts):
    """As `StepParts`.

    Attributes:
      next: (ends, exit, sampling state, x_TD, batch, hidden_RD, lengths_S, drafts_KS, index)
        -> (drafts_KS, moving, x_TD, shared, hidden_RD).
    """

    next: Callable[..., Any]


def draft_parts(
    model: StepModel,
    bucket: Bucket,
    attention: Callable[..., jax.Array],
    rows_at_once: int,
    block_size: int,
    exit_: nnx.GraphDef | None = None,
) -> DraftParts:
    """The parts as functions of arrays.

    Args:
      model: the draft.
      exit_: what stands above its layers; None: the model's own norm and head.
      attention: `ragged_paged_attention` with its scale and backend chosen.
      rows_at_once: see `sampling.sample`.
    """
    return DraftParts(
        partial(begin_step, model, bucket),
        tuple(partial(layer_step, graphdef, attention) for graphdef in model.layers),
        partial(next_tokens, model, exit_, rows_at_once, block_size),
    )


def next_tokens(
    model: StepModel,
    exit_: nnx.GraphDef | None,
    rows_at_once: int,
    block_size: int,
    ends: nnx.State,
    exit_state: nnx.State | None,
    sampling: SamplingState,
    x_TD: jax.Array,
    batch: ForwardBatch,
    hidden_RD: jax.Array | None,
    lengths_S: jax.Array,
    drafts_KS: jax.Array,
    index: jax.Array,
) -> tuple[jax.Array, Moving, jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    """Draw a token for each row, and make it the row's input.

    Args:
      sampling: as the target's last step has left it; draft tokens are not counted.
      x_TD: what the last layer gives.
      hidden_RD: by slot, the final hidden state of the token before; None without an exit.
      lengths_S: int32, how many draft tokens each row wants. A row that has them stays where it is.
      drafts_KS: int32, where they go; this call writes row `index`.

    Returns:
      (drafts_KS, what is new in the batch, its hidden states before the first layer [T, D], what all layers share,
       hidden_RD with guesses)
    """
    module = nnx.merge(model.ends, ends)
    early_SD, token_ids_V = x_TD[batch.logits_indices_S], None
    if exit_ is None:
        logits_SV = module.compute_logits(module.norm(early_SD))
    else:
        assert hidden_RD is not None
        above, slots_S = nnx.merge(exit_, exit_state), batch.sampling.state_rows_S
        guess_SD = above.guess(early_SD, hidden_RD[slots_S])
        hidden_RD = hidden_RD.at[slots_S].set(guess_SD, mode="promise_in_bounds")
        logits_SV, token_ids_V = above.compute_logits(guess_SD), above.token_ids[...]
    token_S, _ = sample(
        logits_SV,
        batch.sampling,
        batch.flags,
        sampling,
        rows_at_once=rows_at_once,
        token_ids_V=token_ids_V,
    )
    moving = advance(batch, token_S, index + 1 < lengths_S, block_size)
    x_TD, shared = module.embed(moving.token_ids_T, moving.positions_T)
    return drafts_KS.at[index].set(token_S), moving, x_TD, shared, hidden_RD


def advance(batch: ForwardBatch, token_S: jax.Array, goes_on_S: jax.Array, block_size: int) -> Moving:
    """The batch one token further. Rows that do not go on keep their place, and write to the sink."""
    count = min(token_S.shape[0], batch.token_ids_T.shape[0])  # rows of one token: token s is row s's
    step_S = goes_on_S.astype(jnp.int32)
    position_S = batch.positions_T[:count] + step_S[:count]
    block, offset = lax.div(position_S, block_size), lax.rem(position_S, block_size)
    block_ids_S = jnp.take_along_axis(batch.block_tables_SB[:count], block[:, None], axis=1, mode="clip")[
        :, 0
    ]
    slot_S = jnp.where(goes_on_S[:count], block_ids_S * block_size + offset, 0)
    return Moving(
        token_ids_T=batch.token_ids_T.at[:count].set(token_S[:count]),
        positions_T=batch.positions_T.at[:count].set(position_S),
        slot_mapping_T=batch.slot_mapping_T.at[:count].set(slot_S),
        seq_lens_S=batch.seq_lens_S + step_S,
        sample_positions_S=batch.sampling.positions_S + step_S,
    )


def draft_step(
    parts: DraftParts,
    params: DraftParams,
    cache: KVCache,
    sampling: SamplingState,
    last_token_ids_R: jax.Array,
    hidden_RD: jax.Array | None,
    packed: jax.Array,
    lengths_S: Any,
    drafts_KS: Any,
    *,
    repeat: Callable[[Any, Any, Callable[[Any, Any], Any], Any], Any] = lax.fori_loop,
) -> tuple[KVCache, jax.Array]:
    """As many draft tokens as each row wants.

    Args:
      cache: of the draft's layers. The key and value of a row's i-th token go to its position + i.
      hidden_RD: what `observe_step` gave last; None without an exit.
      packed: see `batch.layout`; rows of one token each, whose place in the cache is there for all draft tokens.
      lengths_S, drafts_KS: see `next_tokens`; what `drafts_KS` holds does not matter.
      repeat: `lax.fori_loop` inside a program; with programs for parts, `repeat_on_host`.

    Returns:
      (the cache, drafts_KS: column s holds row s's tokens in its first `lengths_S[s]` entries)
    """
    batch, x_TD, shared = parts.begin(params.ends, last_token_ids_R, packed)

    def one_token(index: Any, carry: Any) -> Any:
        cache, drafts_KS, moving, x_TD, shared, hidden_RD = carry
        now = moving.put_into(batch)
        cache, x_TD = run_layers(parts.layers, params, cache, x_TD, shared, now)
        drafts_KS, *new = parts.next(
            params.ends, params.exit, sampling, x_TD, now, hidden_RD, lengths_S, drafts_KS, index
        )
        return cache, drafts_KS, *new

    start = (cache, drafts_KS, Moving.of(batch), x_TD, shared, hidden_RD)
    cache, drafts_KS, *_ = repeat(0, lengths_S.max(), one_token, start)
    return cache, drafts_KS


def follow_step(
    parts: ForwardParts, params: StepParams, cache: KVCache, last_token_ids_R: jax.Array, packed: jax.Array
) -> KVCache:
    """A target's step as a draft model with a cache of its own sees it: its cache then holds the same tokens.

    Args:
      last_token_ids_R: as before the target's step.
    """
    batch, x_TD, shared = parts.begin(params.ends, last_token_ids_R, packed)
    cache, _ = run_layers(parts.layers, params, cache, x_TD, shared, batch)
    return cache


def observe_step(
    bucket: Bucket, hidden_RD: jax.Array, packed: jax.Array, hidden_SD: jax.Array, token_ids_S: jax.Array
) -> jax.Array:
    """A target's step as an exit needs it: by slot, the final hidden state that the last token was sampled of.

    Args:
      packed: the step's batch; hidden_SD, token_ids_S: what it gave, see `StepOutput` and `Sampled`.
    """
    rows = unpack_batch(packed, bucket).sampling
    return keep_last(hidden_RD, hidden_SD, accepted_rows(token_ids_S, rows), rows)


def repeat_on_host(start: int, stop: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` outside of a program."""
    for index in range(start, int(stop)):
        carry = body(np.int32(index), carry)
    return carry
