"""From logits to tokens, on the device: pure functions.

A row's token is a function of that row's logits, its parameters, its own history and its key. Nothing is drawn or
sorted across rows, and every optional part leaves rows that did not ask for it untouched, bit for bit.

Order, for rows that ask: repetition, frequency and presence penalties, logit bias, banned stop tokens; then the mask
of a grammar; then temperature, top-k, top-p (mass of what top-k kept), min-p; then one draw by the Gumbel-max rule
(arXiv 1611.01144). Noise is indexed by token id, so filters and batch mates can't shift it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.device.forward_batch import SamplingRows
from jaxserve.request import MAX_LOGPROBS

_PROMPT_BIT = 1 << 30  # of SamplingState.token_info: the token occurs in the prompt
_STOP_BIT = 1 << 29  # ... would end the request
_COUNT_MASK = (1 << 29) - 1  # ... occurrences in the output
_EXCLUDED = -1e30  # finite: a row in which everything were excluded must not turn into NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Per-request history and bias, one row a running request (`Request.slot`) and a spare one for padding.

    Attributes:
      token_info_RV: int32; bits 0..28 count a token's occurrences in the output, bit 29 marks a token that would
        end the request, bit 30 one that occurs in the prompt.
      logit_bias_RV: float32.
    """

    token_info_RV: jax.Array
    logit_bias_RV: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Model log-probabilities of M positions; zeros where nobody asked.

    Attributes:
      chosen_M: float32, of the token that stands there. rank_M: int32, 1 for the most likely.
      top_ids_MK, top_MK: int32 and float32, the MAX_LOGPROBS most likely tokens, best first.
    """

    chosen_M: jax.Array
    rank_M: jax.Array
    top_ids_MK: jax.Array
    top_MK: jax.Array

    @classmethod
    def structure(cls) -> Logprobs:
        """An instance with a placeholder for each array, for its tree structure."""
        leaf: Any = 0
        return cls(leaf, leaf, leaf, leaf)


def init_state(num_rows: int, vocab_size: int) -> SamplingState:
    return SamplingState(
        token_info_RV=jnp.zeros((num_rows, vocab_size), jnp.int32),
        logit_bias_RV=jnp.zeros((num_rows, vocab_size), jnp.float32),
    )


ROW_CHUNK = 1024  # entries one call of `load_row` takes
ENTRY_NONE, ENTRY_OUTPUT, ENTRY_PROMPT, ENTRY_STOP, ENTRY_BIAS = range(5)


def load_row(
    state: SamplingState,
    row: jax.Array,
    clear: jax.Array,
    token_ids_E: jax.Array,
    kinds_E: jax.Array,
    values_E: jax.Array,
) -> SamplingState:
    """Add entries to one request's row (after emptying it where `clear` says so).

    Args:
      row, clear: int32 scalars.
      token_ids_E, kinds_E: int32 [ROW_CHUNK]; an entry of kind ENTRY_NONE does nothing.
      values_E: float32 [ROW_CHUNK]; the bias, for ENTRY_BIAS.
    """
    info_V = jnp.where(clear != 0, 0, state.token_info_RV[row])
    bias_V = jnp.where(clear != 0, 0.0, state.logit_bias_RV[row])
    info_V = info_V.at[token_ids_E].add((kinds_E == ENTRY_OUTPUT).astype(jnp.int32))
    for kind, bit in ((ENTRY_PROMPT, _PROMPT_BIT), (ENTRY_STOP, _STOP_BIT)):
        marked = jnp.zeros_like(info_V).at[token_ids_E].max((kinds_E == kind).astype(jnp.int32))
        info_V = info_V | (marked * bit)
    bias_V = bias_V.at[token_ids_E].add(jnp.where(kinds_E == ENTRY_BIAS, values_E, 0.0))
    return SamplingState(
        token_info_RV=state.token_info_RV.at[row].set(info_V),
        logit_bias_RV=state.logit_bias_RV.at[row].set(bias_V),
    )


def sample(
    logits_SV: jax.Array,
    rows: SamplingRows,
    batch_flags: jax.Array,
    state: SamplingState,
    allowed_SW: jax.Array | None = None,
    *,
    rows_at_once: int,
    token_ids_V: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token a row.

    Args:
      logits_SV: float32.
      allowed_SW: masks as `batch.masks` packs them; read with BatchFlag.MASK, by rows with RowFlag.MASK. None: masks
        are left aside, for guesses that need not keep to them.
      rows_at_once: rows the random path works on together: 1 keeps a row in a CPU's cache, all of them suit a GPU.
      token_ids_V: int32, ascending, the tokens that the logits are of, where these are not of the whole vocabulary; no
        others are drawn, and each has the noise that it has among all. Without masks only.

    Returns:
      token_ids_S (int32), finite_S (bool: the row's logits hold no NaN or infinity).
    """
    finite_S = jnp.isfinite(logits_SV).all(-1)
    processed_SV = lax.cond(
        (batch_flags & BatchFlag.PROCESS_LOGITS) != 0,
        lambda: _process(logits_SV, rows, state, token_ids_V),
        lambda: logits_SV,
    )
    if allowed_SW is not None:
        processed_SV = lax.cond(
            (batch_flags & BatchFlag.MASK) != 0,
            lambda: _mask(processed_SV, allowed_SW, rows),
            lambda: processed_SV,
        )
    greedy_S = argmax(processed_SV)
    token_S = lax.cond(
        (batch_flags & BatchFlag.RANDOM) != 0,
        lambda: _draw_rows(processed_SV, greedy_S, rows, rows_at_once, token_ids_V),
        lambda: greedy_S,
    )
    return token_S if token_ids_V is None else token_ids_V[token_S], finite_S


def count_tokens(
    state: SamplingState, rows: SamplingRows, token_ids_S: jax.Array, accepted_S: jax.Array
) -> SamplingState:
    """The state with the new tokens of accepted rows counted."""
    counted_S = (((rows.flags_S & RowFlag.SAMPLE) != 0) & accepted_S).astype(jnp.int32)
    where = (rows.state_rows_S, token_ids_S)
    token_info = state.token_info_RV.at[where].add(counted_S, mode="promise_in_bounds")
    return SamplingState(token_info, state.logit_bias_RV)


def argmax(logits_SV: jax.Array) -> jax.Array:
    """Index of the largest entry of each row, the first one among equals; int32. (0 for a row of NaN.)"""
    best_S1 = logits_SV.max(-1, keepdims=True)
    vocab = logits_SV.shape[-1]
    index = jnp.where(logits_SV == best_S1, jnp.arange(vocab, dtype=jnp.int32), vocab)
    return index.min(-1) % vocab


def logprobs_by_row(logits_MV: jax.Array, token_M: jax.Array) -> Logprobs:
    """`logprobs_of`, one row at a time, so that no row's bits depend on M."""
    by_row = lax.map(lambda row: logprobs_of(row[0][None], row[1][None]), (logits_MV, token_M))
    return jax.tree.map(lambda x: x[:, 0], by_row)


def logprobs_of(logits_MV: jax.Array, token_M: jax.Array) -> Logprobs:
    """Logprobs of given tokens and of the most likely ones."""
    normalizer_M = jax.nn.logsumexp(logits_MV, axis=-1)
    chosen_M = jnp.take_along_axis(logits_MV, token_M[:, None], axis=-1)[:, 0]
    top_MK, top_ids_MK = lax.top_k(logits_MV, min(MAX_LOGPROBS, logits_MV.shape[-1]))
    better = logits_MV > chosen_M[:, None]
    return Logprobs(
        chosen_M=chosen_M - normalizer_M,
        rank_M=1 + better.sum(-1, dtype=jnp.int32),
        top_ids_MK=top_ids_MK.astype(jnp.int32),
        top_MK=top_MK - normalizer_M[:, None],
    )


def no_logprobs(num_positions: int, vocab_size: int) -> Logprobs:
    width = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        chosen_M=jnp.zeros(num_positions, jnp.float32),
        rank_M=jnp.zeros(num_positions, jnp.int32),
        top_ids_MK=jnp.zeros((num_positions, width), jnp.int32),
        top_MK=jnp.zeros((num_positions, width), jnp.float32),
    )


def _process(
    logits_SV: jax.Array, rows: SamplingRows, state: SamplingState, token_ids_V: jax.Array | None = None
) -> jax.Array:
    """Penalties, bias and banned stops, for the rows that ask for each."""
    of_logits = lambda x: x if token_ids_V is None else x[:, token_ids_V]  # noqa: E731
    info_SV = state.token_info_RV[rows.state_rows_S]
    count_SV = of_logits(_count_drafts(info_SV & _COUNT_MASK, rows))
    info_SV = of_logits(info_SV)
    in_output_SV = count_SV > 0
    in_either_SV = in_output_SV | ((info_SV & _PROMPT_BIT) != 0)

    wants = lambda flag: ((rows.flags_S & flag) != 0)[:, None]  # noqa: E731
    repetition_S1 = rows.repetition_penalty_S[:, None]
    repeated = jnp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    penalised = jnp.where(in_either_SV, repeated, logits_SV)
    penalised -= rows.frequency_penalty_S[:, None] * count_SV.astype(jnp.float32)
    penalised -= rows.presence_penalty_S[:, None] * in_output_SV
    out = jnp.where(wants(RowFlag.PENALTIES), penalised, logits_SV)
    bias_SV = of_logits(state.logit_bias_RV[rows.state_rows_S])
    out = jnp.where(wants(RowFlag.LOGIT_BIAS), out + bias_SV, out)
    banned = wants(RowFlag.BAN_STOPS) & ((info_SV & _STOP_BIT) != 0)
    return jnp.where(banned, _EXCLUDED, out)


def unpack_mask(allowed_SW: jax.Array, vocab_size: int) -> jax.Array:
    """Bool [S, V], of masks as `batch.masks` packs them."""
    bits_SW32 = (allowed_SW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits_SW32.reshape(allowed_SW.shape[0], -1)[:, :vocab_size] != 0


def _mask(logits_SV: jax.Array, allowed_SW: jax.Array, rows: SamplingRows) -> jax.Array:
    """Exclude what the rows' masks do not allow.

    Where a mask leaves nothing but tokens that are banned by now (min_tokens), it counts and the ban does not.
    """
    allowed_SV = unpack_mask(allowed_SW, logits_SV.shape[-1])
    wants_S1 = ((rows.flags_S & RowFlag.MASK) != 0)[:, None]
    banned_SV = allowed_SV & (logits_SV <= _EXCLUDED)
    only_banned_S1 = (allowed_SV == banned_SV).all(-1, keepdims=True)
    masked = jnp.where(allowed_SV, jnp.where(only_banned_S1, 0.0, logits_SV), _EXCLUDED)
    return jnp.where(wants_S1, masked, logits_SV)


def _count_drafts(count_SV: jax.Array, rows: SamplingRows) -> jax.Array:
    """The counts with the drafts that stand before each row's sample: a row counts only if these are accepted."""
    at_S = jnp.arange(count_SV.shape[0])

    def add(back: jax.Array, count_SV: jax.Array) -> jax.Array:
        there_S = (back < rows.draft_indices_S).astype(jnp.int32)
        return count_SV.at[at_S, rows.draft_ids_S[at_S - back]].add(there_S)

    return lax.fori_loop(0, rows.draft_indices_S.max(), add, count_SV)


def _draw_rows(
    logits_SV: jax.Array,
    greedy_S: jax.Array,
    rows: SamplingRows,
    rows_at_once: int,
    token_ids_V: jax.Array | None,
) -> jax.Array:
    """Rows with RowFlag.RANDOM drawn, the others as `greedy_S`; indices of logits."""

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        logits_V, greedy, flags, *parameters = row
        draw = partial(_draw, logits_V, *parameters, token_ids_V=token_ids_V)
        return lax.cond((flags & RowFlag.RANDOM) != 0, draw, lambda: greedy)

    arguments = (
        logits_SV,
        greedy_S,
        rows.flags_S,
        rows.seeds_S2,
        rows.positions_S,
        rows.temperature_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.min_p_S,
    )
    together = min(rows_at_once, logits_SV.shape[0])
    return lax.map(one, arguments, batch_size=together if together > 1 else None)


def _draw(
    logits_V: jax.Array,
    seed_2: jax.Array,
    position: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    token_ids_V: jax.Array | None,
) -> jax.Array:
    # Subtracting the peak first keeps tiny temperatures finite: the best token stays at exactly 0.
    scaled_V = jnp.maximum((logits_V - logits_V.max()) / temperature, _EXCLUDED)
    kept_V = filter_logits(scaled_V, top_k, top_p, min_p)
    if token_ids_V is None:
        noise_V = gumbel_noise(seed_2, position, logits_V.shape[0])
    else:
        noise_V = gumbel_noise_of(seed_2, position, token_ids_V)
    return argmax((kept_V + noise_V)[None])[0]


def filter_logits(scaled_V: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Exclude what top-k, top-p and min-p exclude; the most likely token always stays.

    Tokens that tie with the last one kept are kept as well. Thresholds are found by bisection over the bits of the
    floats (32 rounds, exact), which needs no sort.

    Args:
      scaled_V: float32 logits over temperature, their maximum 0.
    """
    vocab = scaled_V.shape[0]
    keys_V = _ordered_key(scaled_V)
    wanted = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))
    key_k = lax.cond(
        wanted < vocab,
        lambda: _largest_key(lambda key: (keys_V >= key).sum(dtype=jnp.int32) >= wanted),
        lambda: jnp.int32(-(2**31)),
    )
    weight_V = jnp.where(keys_V >= key_k, jnp.exp(scaled_V), 0.0)
    mass = top_p * weight_V.sum()
    key_p = lax.cond(
        top_p < 1.0,
        # top_p = 0 asks for no mass at all, which the empty set satisfies: the peak's own key is the limit.
        lambda: jnp.minimum(
            _largest_key(lambda key: jnp.where(keys_V >= key, weight_V, 0.0).sum() >= mass), keys_V.max()
        ),
        lambda: jnp.int32(-(2**31)),
    )
    keep_V = (keys_V >= jnp.maximum(key_k, key_p)) & (jnp.exp(scaled_V) >= min_p)
    return jnp.where(keep_V | (scaled_V >= 0.0), scaled_V, _EXCLUDED)


def gumbel_noise(seed_2: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise for every token id; finite, a function of (seed, position, token id) alone.

    Args:
      seed_2: uint32 (high, low) words of the request's seed.
    """
    return gumbel_from_bits(jax.random.bits(_noise_key(seed_2, position), (vocab_size,), jnp.uint32))


def gumbel_noise_of(seed_2: jax.Array, position: jax.Array, token_ids_V: jax.Array) -> jax.Array:
    """What `gumbel_noise` has for these tokens, at the cost of these alone: JAX makes its bits i by hashing i."""
    counts = jnp.concatenate([jnp.zeros_like(token_ids_V), token_ids_V]).astype(jnp.uint32)
    high_V, low_V = jnp.split(threefry_2x32(jax.random.key_data(_noise_key(seed_2, position)), counts), 2)
    return gumbel_from_bits(high_V ^ low_V)


def _noise_key(seed_2: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)


def gumbel_from_bits(bits_V: jax.Array) -> jax.Array:
    """Standard Gumbel noise from uniformly random uint32."""
    # 23 bits, centred between the steps: the uniform is never 0 or 1, so both logarithms are finite.
    uniform_V = ((bits_V >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform_V))


def _ordered_key(x: jax.Array) -> jax.Array:
    """int32 keys that order as the floats do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_key(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 key for which the monotone `holds(key)` is true (it is true for the smallest)."""

    def narrow(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds(low), not holds(high + 1)
        middle = (low & high) + ((low ^ high) >> 1)  # floor of the mean without overflow
        middle = middle + ((low ^ high) & 1)  # ... rounded up, so that the interval always shrinks
        good = holds(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low, _ = lax.fori_loop(0, 32, narrow, (jnp.int32(-(2**31)), jnp.int32(2**31 - 1)))
    return low
