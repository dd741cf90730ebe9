"""serve_step: (params, state, packed batch, masks) -> (state, output), and the parts that it is made of. Pure."""

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
from jaxserve.device.forward_batch import ForwardBatch, SamplingRows, unpack_batch
from jaxserve.device.kv_cache import KVCache, join_layers, write_kv
from jaxserve.device.sampling import (
    Logprobs,
    SamplingState,
    count_tokens,
    logprobs_by_row,
    logprobs_of,
    no_logprobs,
    sample,
)
from jaxserve.device.step_parts import StepModel, StepParams, StepParts
from jaxserve.device.verification import accepted_rows, last_accepted_rows

_SCORED_ROWS = 32  # prompt positions scored at a time, so that T x V logits never exist at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything on the device that a step changes; donated to it.

    Attributes:
      kv_cache: keys and values of every block.
      sampling: per-request token counts and biases.
      last_token_ids_R: int32, the token accepted last for each slot, so that the next step need not wait until the host
        has read it.
    """

    kv_cache: KVCache
    sampling: SamplingState
    last_token_ids_R: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What is new about each row.

    Attributes:
      token_ids_S: int32, each row's new token (meaningless for rows that do not sample).
      finite_S: bool, whether the row's logits were all finite.
      logprobs: of the new tokens [S]; zeros unless BatchFlag.LOGPROBS.
      logits_SV: float32, each row's logits as the model gave them; None unless the step keeps them.
    """

    token_ids_S: jax.Array
    finite_S: jax.Array
    logprobs: Logprobs
    logits_SV: jax.Array | None = None

    @classmethod
    def structure(cls, *, keep_logits: bool = False) -> Sampled:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        return cls(leaf, leaf, Logprobs.structure(), leaf if keep_logits else None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the host reads back.

    Attributes:
      sampled: see there.
      prompt_logprobs: of `target_ids_T`, and of padding behind them [P]; zeros unless BatchFlag.PROMPT_LOGPROBS.
      hidden_SD, hidden_PD: final hidden states, of each row's last token and of all; what embeddings are pooled of.
    """

    sampled: Sampled
    prompt_logprobs: Logprobs
    hidden_SD: jax.Array
    hidden_PD: jax.Array

    @classmethod
    def structure(cls, *, keep_logits: bool = False) -> StepOutput:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        return cls(Sampled.structure(keep_logits=keep_logits), Logprobs.structure(), leaf, leaf)


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


def select_step(
    model: StepModel, ends: nnx.State, x_TD: jax.Array, batch: ForwardBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Final hidden states of the tokens that somebody may want logits of.

    Returns:
      (each row's last [S, D], all [P, D], the tokens that follow these [P]); P is `num_scored(T)`.
    """
    hidden_TD = nnx.merge(model.ends, ends).norm(x_TD)
    num_tokens = hidden_TD.shape[0]
    extra = num_scored(num_tokens) - num_tokens
    hidden_PD = jnp.pad(hidden_TD, ((0, extra), (0, 0)))
    return hidden_TD[batch.logits_indices_S], hidden_PD, jnp.pad(batch.target_ids_T, (0, extra))


def sample_step(
    model: StepModel,
    rows_at_once: int,
    ends: nnx.State,
    sampling: SamplingState,
    last_token_ids_R: jax.Array,
    hidden_SD: jax.Array,
    rows: SamplingRows,
    flags: jax.Array,
    allowed_SW: jax.Array,
    *,
    deterministic: bool = False,
    keep_logits: bool = False,
) -> tuple[SamplingState, jax.Array, Sampled]:
    """Logits, and one sampled token for each row.

    Args:
      allowed_SW: see `sampling.sample`.
      rows_at_once: see `sampling.sample`.
      deterministic: logprobs have the same bits whatever the bucket is. (Model and attention have such flags of
        their own, and sampling needs none with `rows_at_once` 1.)
      keep_logits: return the logits as well, for tests.
    """
    with jax.named_scope("logits"):
        logits_SV = nnx.merge(model.ends, ends).compute_logits(hidden_SD)
    with jax.named_scope("sample"):
        token_S, finite_S = sample(logits_SV, rows, flags, sampling, allowed_SW, rows_at_once=rows_at_once)
        accepted_S = accepted_rows(token_S, rows)
        sampling = count_tokens(sampling, rows, token_S, accepted_S)
    with jax.named_scope("logprobs"):
        score = logprobs_by_row if deterministic else logprobs_of
        logprobs = lax.cond(
            (flags & BatchFlag.LOGPROBS) != 0,
            lambda: score(logits_SV, token_S),
            lambda: no_logprobs(*logits_SV.shape),
        )
    last_token_ids_R = keep_last(last_token_ids_R, token_S, accepted_S, rows)
    return (
        sampling,
        last_token_ids_R,
        Sampled(token_S, finite_S, logprobs, logits_SV if keep_logits else None),
    )


def keep_last(by_slot_R: jax.Array, new_S: jax.Array, accepted_S: jax.Array, rows: SamplingRows) -> jax.Array:
    """`by_slot_R` with what is new of each request's last accepted row.

    Rows that do not sample write as well: nobody reads a slot's before the slot has sampled.

    Args:
      by_slot_R: [R, ...], the last one spare.
      new_S: [S, ...].
      accepted_S: see `accepted_rows`.
    """
    spare = by_slot_R.shape[0] - 1
    state_rows_S = jnp.where(last_accepted_rows(accepted_S, rows), rows.state_rows_S, spare)
    return by_slot_R.at[state_rows_S].set(new_S, mode="promise_in_bounds")


def score_step(
    model: StepModel,
    ends: nnx.State,
    hidden_PD: jax.Array,
    targets_P: jax.Array,
    flags: jax.Array,
    *,
    deterministic: bool = False,
) -> Logprobs:
    """Logprobs of `targets_P`, a few rows at a time; no work at all unless somebody asked."""
    compute_logits = nnx.merge(model.ends, ends).compute_logits
    score = logprobs_by_row if deterministic else logprobs_of

    def chunk(index: jax.Array, scored: Logprobs) -> Logprobs:
        start = index * _SCORED_ROWS
        new = score(
            compute_logits(lax.dynamic_slice_in_dim(hidden_PD, start, _SCORED_ROWS)),
            lax.dynamic_slice_in_dim(targets_P, start, _SCORED_ROWS),
        )
        return jax.tree.map(
            lambda all_, part: lax.dynamic_update_slice_in_dim(all_, part, start, 0), scored, new
        )

    # A branch, not a loop of no rounds: XLA hoists the body out of a loop that has at most one round.
    vocab_size = jax.eval_shape(compute_logits, hidden_PD).shape[-1]
    none = no_logprobs(targets_P.shape[0], vocab_size)
    with jax.named_scope("prompt_logprobs"):
        return lax.cond(
            (flags & BatchFlag.PROMPT_LOGPROBS) != 0,
            lambda: lax.fori_loop(0, targets_P.shape[0] // _SCORED_ROWS, chunk, none),
            lambda: none,
        )


def num_scored(num_tokens: int) -> int:
    """P for T: the next power of two, so that many shapes share one program; whole chunks."""
    return max(_SCORED_ROWS, 1 << (num_tokens - 1).bit_length())


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
        partial(select_step, model),
        partial(sample_step, model, rows_at_once, deterministic=deterministic, keep_logits=keep_logits),
        partial(score_step, model, deterministic=deterministic),
    )


def serve_step(
    parts: StepParts,
    params: StepParams,
    state: DeviceState,
    packed: jax.Array,
    allowed: Callable[[], jax.Array],
) -> tuple[DeviceState, StepOutput]:
    """One forward pass over a packed batch, and one sampled token for each row.

    Called with functions for parts inside a program, or with programs for parts outside of any.

    Args:
      packed: int32 vector, see `batch.layout`.
      allowed: gives uint32 [S, W], see `sampling.sample`; asked once the layers have been launched.
    """
    batch, x_TD, shared = parts.begin(params.ends, state.last_token_ids_R, packed)
    cache, x_TD = run_layers(parts.layers, params, state.kv_cache, x_TD, shared, batch)
    sampling, last_token_ids_R, output = finish_step(parts, params.ends, state, x_TD, batch, allowed)
    return DeviceState(cache, sampling, last_token_ids_R), output


def serve_whole_step(
    parts: StepParts, params: StepParams, state: DeviceState, packed: jax.Array, allowed_SW: jax.Array
) -> tuple[DeviceState, StepOutput]:
    """`serve_step` as one function of arrays."""
    return serve_step(parts, params, state, packed, lambda: allowed_SW)


def run_layers(
    layers: tuple[Callable[..., Any], ...],
    params: StepParams,
    cache: KVCache,
    x_TD: jax.Array,
    shared: tuple[jax.Array, ...],
    batch: ForwardBatch,
) -> tuple[KVCache, jax.Array]:
    """All layers of a model, one after the other: (cache, x_TD).

    Args:
      cache: may have further layers, which stay as they are.
    """
    caches = []
    for index, (part, layer) in enumerate(zip(layers, params.layers, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            own, x_TD = part(layer, cache.layer(index), x_TD, shared, batch)
        caches.append(own)
    return cache.with_part(0, join_layers(caches)), x_TD


def finish_step(
    parts: StepParts,
    ends: nnx.State,
    state: DeviceState,
    x_TD: jax.Array,
    batch: ForwardBatch,
    allowed: Callable[[], jax.Array],
) -> tuple[SamplingState, jax.Array, StepOutput]:
    """What comes after the layers: (sampling state, last_token_ids_R, output)."""
    hidden_SD, hidden_PD, targets_P = parts.select(ends, x_TD, batch)
    sampling, last_token_ids_R, sampled = parts.sample(
        ends, state.sampling, state.last_token_ids_R, hidden_SD, batch.sampling, batch.flags, allowed()
    )
    prompt_logprobs = parts.score(ends, hidden_PD, targets_P, batch.flags)
    return sampling, last_token_ids_R, StepOutput(sampled, prompt_logprobs, hidden_SD, hidden_PD)
