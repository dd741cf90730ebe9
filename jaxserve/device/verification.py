"""Which rows of a step count: all of them, but for drafts that the target would have continued otherwise. Pure.

A request with drafts d1 .. dk has 1 + k rows side by side: its last known token, then the drafts. Row j yields what the
target samples after the first j drafts, by the random numbers of that position. So the target's own sample stands at
every position, and a draft is accepted while it equals the sample of the row before: the tokens are those of a run
without drafts, greedy or not, whoever proposed the drafts. (Speculative decoding, arXiv 2211.17192, accepts with
probability min(1, p / q) instead; where proposals come from a distribution of their own, they are drawn with the
target's noise here, which accepts nearly as often: arXiv 2408.07978.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.device.forward_batch import SamplingRows


def accepted_rows(token_ids_S: jax.Array, rows: SamplingRows) -> jax.Array:
    """Bool [S]: whether every draft up to and including this row's input is what the target sampled there.

    Args:
      token_ids_S: int32, what each row sampled.
    """
    is_draft_S = rows.draft_indices_S > 0
    differs_S = is_draft_S & (rows.draft_ids_S != jnp.roll(token_ids_S, 1))
    num_differing_S = jnp.cumsum(differs_S)
    # A request's first row holds no draft, so it counts those of the rows above alone.
    first_S = jnp.arange(token_ids_S.shape[0]) - rows.draft_indices_S
    return num_differing_S == num_differing_S[first_S]


def last_accepted_rows(accepted_S: jax.Array, rows: SamplingRows) -> jax.Array:
    """Bool [S]: whether no row of the same request behind this accepted one is accepted as well."""
    goes_on_S = jnp.roll(accepted_S & (rows.draft_indices_S > 0), -1)
    return accepted_S & ~goes_on_S
