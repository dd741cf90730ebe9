"""Rows of sampling parameters for tests, and the sampler compiled once for each shape."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.device.forward_batch import SamplingRows
from jaxserve.device.sampling import SamplingState, init_state, sample

VOCAB = 64

jitted_sample = jax.jit(sample, static_argnames="rows_at_once")


def make_rows(num_rows: int, **fields: Any) -> SamplingRows:
    """`SamplingRows` with every field at its neutral value unless given: a scalar, or one value a row.

    `seed` is a Python integer (or several); row s uses state row s unless `state_rows` says otherwise.
    """

    def column(name: str, neutral: Any, dtype: Any) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(fields.pop(name, neutral), dtype), (num_rows,)))

    seeds = np.broadcast_to(np.asarray(fields.pop("seed", 0), np.uint64), (num_rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    rows = SamplingRows(
        state_rows_S=column("state_rows", np.arange(num_rows), np.int32),
        positions_S=column("positions", 0, np.int32),
        seeds_S2=jnp.asarray(words),
        flags_S=column("flags", int(RowFlag.SAMPLE), np.int32),
        draft_indices_S=column("draft_indices", 0, np.int32),
        draft_ids_S=column("draft_ids", 0, np.int32),
        top_k_S=column("top_k", 0, np.int32),
        temperature_S=column("temperature", 1.0, np.float32),
        top_p_S=column("top_p", 1.0, np.float32),
        min_p_S=column("min_p", 0.0, np.float32),
        presence_penalty_S=column("presence_penalty", 0.0, np.float32),
        frequency_penalty_S=column("frequency_penalty", 0.0, np.float32),
        repetition_penalty_S=column("repetition_penalty", 1.0, np.float32),
    )
    assert not fields, f"unknown fields {sorted(fields)}"
    return rows


def draw(
    logits_SV: Any,
    rows: SamplingRows,
    *,
    state: SamplingState | None = None,
    batch_flags: int = int(BatchFlag.RANDOM | BatchFlag.PROCESS_LOGITS),
    rows_at_once: int = 1,
) -> np.ndarray:
    """Tokens of `sample`, with a state of zeros unless given."""
    logits_SV = jnp.asarray(logits_SV, jnp.float32)
    if state is None:
        state = init_state(logits_SV.shape[0] + 1, logits_SV.shape[1])
    tokens_S, _ = jitted_sample(logits_SV, rows, jnp.int32(batch_flags), state, rows_at_once=rows_at_once)
    return np.asarray(tokens_S)


RANDOM_ROW = int(RowFlag.SAMPLE | RowFlag.RANDOM)
no_processing = partial(draw, batch_flags=int(BatchFlag.RANDOM))
