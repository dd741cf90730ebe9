"""serve_step: (params, state, packed batch) -> (state, output), and the parts that it is made of. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.device.forward_batch import ForwardBatch, unpack_batch
from jaxserve.device.kv_cache import KVCache, join_layers, write_kv
from jaxserve.device.sampling import (
    Logprobs,
    SamplingState,
    logprobs_by_row,
    logprobs_of,
    no_logprobs,
    sample,
)
from jaxserve.device.step_parts import StepModel, StepParams, StepParts

_SCORED_ROWS = 32  # prompt positions scored at a time, so that T x V logits never exist at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything on the device that a step changes; donated to it.

    Attributes:
      kv_cache: keys and values of every block.
      sampling: per-request token counts and biases.
      last_token_ids_R: int32, the token sampled last for each slot, so that the next step need not wait until the host
        has read it.
    """

    kv_cache: KVCache
    sampling: SamplingState
    last_token_ids_R: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads back.

    Attributes:
      token_ids_S: int32, each row's new token (meaningless for rows that do not sample).
      finite_S: bool, whether the row's logits were all finite.
      logprobs: of the new tokens [S]; zeros unless BatchFlag.LOGPROBS.
      prompt_logprobs: of `target_ids_T` [T]; zeros unless BatchFlag.PROMPT_LOGPROBS.
      logits_SV: float32, each row's logits as the model gave them; None unless the step keeps them.
    """

    token_ids_S: jax.Array
    finite_S: jax.Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    logits_SV: jax.Array | None = None

    @classmethod
    def structure(cls, *, keep_logits: bool = False) -> StepOutput:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        logprobs = Logprobs(leaf, leaf, leaf, leaf)
        return cls(leaf, leaf, logprobs, logprobs, leaf if keep_logits else None)


def begin_step(
    model: StepModel, bucket: Bucket, ends: nnx.State, last_token_ids_R: jax.Array, packed: jax.Array
) -> tuple[ForwardBatch, jax.Array, tuple[jax.Array, ...]]:
    """What comes before the layers.

    Args:
      packed: int32 vector, see `batch.layout`.

    Returns:
      (the batch, hidden states [T, D], what all layers share)
    """
    batch = unpack_batch(packed, bucket)
    token_ids_T = _fill_in_last_tokens(batch, last_token_ids_R)
    x_TD, shared = nnx.merge(model.ends, ends).embed(token_ids_T, batch.positions_T)
    return batch, x_TD, shared


def layer_step(
    graphdef: nnx.GraphDef,
    attention: Callable[..., jax.Array],
    layer: nnx.State,
    cache: KVCache,
    x_TD: jax.Array,
    shared: tuple[jax.Array, ...],
    batch: ForwardBatch,
) -> tuple[KVCache, jax.Array]:
    """One layer: writes the batch's keys and values into `cache`, which is this layer's alone, and attends.

    Args:
      attention: `ragged_paged_attention` with its scale and backend chosen.
    """

    def attend(
        index: int, q_THd: jax.Array, k_TKd: jax.Array, v_TKd: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        cache = write_kv(cache, index, k_TKd, v_TKd, batch.slot_mapping_T)
        out_THd = attention(
            q_THd,
            cache.k[index],
            cache.v[index],
            block_tables_SB=batch.block_tables_SB,
            seq_lens_S=batch.seq_lens_S,
            cu_q_lens=batch.cu_q_lens,
            num_decodes=batch.num_decodes,
            num_seqs=batch.num_seqs,
        )
        return out_THd, cache

    x_TD, cache = nnx.merge(graphdef, layer)(x_TD, shared, 0, cache, attend)
    return cache, x_TD


def end_step(
    model: StepModel,
    rows_at_once: int,
    ends: nnx.State,
    sampling: SamplingState,
    last_token_ids_R: jax.Array,
    x_TD: jax.Array,
    batch: ForwardBatch,
    *,
    deterministic: bool = False,
    keep_logits: bool = False,
) -> tuple[SamplingState, jax.Array, StepOutput]:
    """What comes after the layers: logits, and one sampled token for each row.

    Args:
      rows_at_once: see `sampling.sample`.
      deterministic: logprobs have the same bits whatever the bucket is. (Model and attention have such flags of
        their own, and sampling needs none with `rows_at_once` 1.)
      keep_logits: return the logits as well, for tests.
    """
    score = logprobs_by_row if deterministic else logprobs_of
    top = nnx.merge(model.ends, ends)
    hidden_TD = top.norm(x_TD)
    with jax.named_scope("logits"):
        logits_SV = top.compute_logits(hidden_TD[batch.logits_indices_S])
    with jax.named_scope("sample"):
        token_S, finite_S, sampling = sample(
            logits_SV, batch.sampling, batch.flags, sampling, rows_at_once=rows_at_once
        )
    with jax.named_scope("logprobs"):
        num_rows, vocab_size = logits_SV.shape
        logprobs = lax.cond(
            (batch.flags & BatchFlag.LOGPROBS) != 0,
            lambda: score(logits_SV, token_S),
            lambda: no_logprobs(num_rows, vocab_size),
        )
        prompt_logprobs = _score_prompt(top.compute_logits, score, hidden_TD, batch, vocab_size)
    output = StepOutput(token_S, finite_S, logprobs, prompt_logprobs, logits_SV if keep_logits else None)
    # Rows that do not sample write as well: nobody reads a slot's token before the slot has sampled one.
    last_token_ids_R = last_token_ids_R.at[batch.sampling.state_rows_S].set(token_S, mode="promise_in_bounds")
    return sampling, last_token_ids_R, output


def _fill_in_last_tokens(batch: ForwardBatch, last_token_ids_R: jax.Array) -> jax.Array:
    """`token_ids_T` with the tokens that the host did not know yet."""
    rows = batch.sampling
    # Rows of one token come first, so token s is row s's wherever it counts.
    count = min(rows.flags_S.shape[0], batch.token_ids_T.shape[0])
    continues = (rows.flags_S[:count] & RowFlag.CONTINUES) != 0
    last_tokens = last_token_ids_R[rows.state_rows_S[:count]]
    first_tokens = jnp.where(continues, last_tokens, batch.token_ids_T[:count])
    return jnp.concatenate([first_tokens, batch.token_ids_T[count:]])


def step_parts(
    model: StepModel,
    bucket: Bucket,
    attention: Callable[..., jax.Array],
    rows_at_once: int,
    *,
    deterministic: bool = False,
    keep_logits: bool = False,
) -> StepParts:
    """The parts as functions of arrays."""
    return StepParts(
        partial(begin_step, model, bucket),
        tuple(partial(layer_step, graphdef, attention) for graphdef in model.layers),
        partial(end_step, model, rows_at_once, deterministic=deterministic, keep_logits=keep_logits),
    )


def serve_step(
    parts: StepParts, params: StepParams, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, StepOutput]:
    """One forward pass over a packed batch, and one sampled token for each row.

    Called with functions for parts inside a program, or with programs for parts outside of any.
    """
    batch, x_TD, shared = parts.begin(params.ends, state.last_token_ids_R, packed)
    caches = []
    for index, (part, layer) in enumerate(zip(parts.layers, params.layers, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            cache, x_TD = part(layer, state.kv_cache.layer(index), x_TD, shared, batch)
        caches.append(cache)
    sampling, last_token_ids_R, output = parts.end(
        params.ends, state.sampling, state.last_token_ids_R, x_TD, batch
    )
    return DeviceState(join_layers(caches), sampling, last_token_ids_R), output


def _score_prompt(
    compute_logits: Callable[[jax.Array], jax.Array],
    score: Callable[[jax.Array, jax.Array], Logprobs],
    hidden_TD: jax.Array,
    batch: ForwardBatch,
    vocab_size: int,
) -> Logprobs:
    """Logprobs of `target_ids_T`, a few rows at a time; no work at all unless somebody asked."""
    num_tokens = hidden_TD.shape[0]
    rows = min(_SCORED_ROWS, num_tokens)
    # Slices past the end would be clamped onto rows already scored: pad to whole chunks.
    extra = -num_tokens % rows
    hidden = jnp.pad(hidden_TD, ((0, extra), (0, 0)))
    targets = jnp.pad(batch.target_ids_T, (0, extra))

    def chunk(index: jax.Array, scored: Logprobs) -> Logprobs:
        start = index * rows
        new = score(
            compute_logits(lax.dynamic_slice_in_dim(hidden, start, rows)),
            lax.dynamic_slice_in_dim(targets, start, rows),
        )
        return jax.tree.map(
            lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), scored, new
        )

    # A branch, not a loop of no rounds: XLA hoists the body out of a loop that has at most one round.
    none = no_logprobs(num_tokens + extra, vocab_size)
    scored = lax.cond(
        (batch.flags & BatchFlag.PROMPT_LOGPROBS) != 0,
        lambda: lax.fori_loop(0, (num_tokens + extra) // rows, chunk, none),
        lambda: none,
    )
    return jax.tree.map(lambda x: x[:num_tokens], scored)
