"""Counts, marks and biases that the device keeps for each request."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.flags import RowFlag
from jaxserve.device.forward_batch import SamplingRows
from jaxserve.device.sampling import (
    ENTRY_BIAS,
    ENTRY_NONE,
    ENTRY_OUTPUT,
    ENTRY_PROMPT,
    ENTRY_STOP,
    ROW_CHUNK,
    SamplingState,
    count_tokens,
    init_state,
    load_row,
)
from tests.device.sampling_rows import VOCAB, jitted_sample, make_rows

ROWS = 5
PROMPT, STOP = 1 << 30, 1 << 29
jitted_load = jax.jit(load_row)

Entry = tuple[int, int, float]


def load(state: SamplingState, row: int, entries: list[Entry], *, clear: bool = True) -> SamplingState:
    """All entries, in as many calls as they take."""
    for start in range(0, max(1, len(entries)), ROW_CHUNK):
        chunk = entries[start : start + ROW_CHUNK]
        chunk = chunk + [(0, ENTRY_NONE, 9.0)] * (ROW_CHUNK - len(chunk))
        ids, kinds, values = zip(*chunk, strict=True)
        state = jitted_load(
            state,
            np.int32(row),
            np.int32(clear and start == 0),
            np.array(ids, np.int32),
            np.array(kinds, np.int32),
            np.array(values, np.float32),
        )
    return state


def dirty_state() -> SamplingState:
    rng = np.random.default_rng(0)
    return SamplingState(
        jnp.asarray(rng.integers(0, 2**31 - 1, (ROWS, VOCAB)), jnp.int32),
        jnp.asarray(rng.normal(0, 1, (ROWS, VOCAB)), jnp.float32),
    )


def expect(entries: list[Entry]) -> tuple[np.ndarray, np.ndarray]:
    info, bias = np.zeros(VOCAB, np.int64), np.zeros(VOCAB, np.float32)
    for token, kind, value in entries:
        if kind == ENTRY_OUTPUT:
            info[token] += 1
        elif kind == ENTRY_PROMPT:
            info[token] |= PROMPT
        elif kind == ENTRY_STOP:
            info[token] |= STOP
        elif kind == ENTRY_BIAS:
            bias[token] += value
    return info, bias


@pytest.mark.parametrize(
    "num_entries", [0, 1, 50, ROW_CHUNK - 1, ROW_CHUNK, ROW_CHUNK + 1, 2 * ROW_CHUNK + 3]
)
def test_a_row_is_loaded_whatever_it_held(num_entries: int) -> None:
    """Duplicates count, marks do not add up, biases of chunks meet; every other row stays bit for bit."""
    rng = np.random.default_rng(num_entries)
    kinds = (ENTRY_OUTPUT, ENTRY_OUTPUT, ENTRY_PROMPT, ENTRY_STOP, ENTRY_BIAS)
    entries = [
        (int(rng.integers(VOCAB)), int(rng.choice(kinds)), float(rng.integers(-100, 100)))
        for _ in range(num_entries)
    ]
    before = dirty_state()
    after = load(before, 2, entries)
    info, bias = expect(entries)
    assert np.array_equal(after.token_info_RV[2], info)
    assert np.array_equal(after.logit_bias_RV[2], bias)
    others = [0, 1, 3, 4]
    assert np.array_equal(after.token_info_RV[jnp.array(others)], before.token_info_RV[jnp.array(others)])
    assert np.array_equal(after.logit_bias_RV[jnp.array(others)], before.logit_bias_RV[jnp.array(others)])


def test_entries_add_to_a_row_that_is_not_cleared() -> None:
    first: list[Entry] = [(3, ENTRY_OUTPUT, 0), (4, ENTRY_PROMPT, 0), (5, ENTRY_BIAS, 2.5)]
    second: list[Entry] = [
        (3, ENTRY_OUTPUT, 0),
        (4, ENTRY_OUTPUT, 0),
        (4, ENTRY_PROMPT, 0),
        (4, ENTRY_STOP, 0),
    ]
    state = load(load(dirty_state(), 1, first), 1, second, clear=False)
    info, bias = expect(first + second)
    assert np.array_equal(state.token_info_RV[1], info)
    assert np.array_equal(state.logit_bias_RV[1], bias)
    assert info[4] == 1 + PROMPT + STOP


def test_an_empty_slot_of_a_chunk_does_nothing_to_its_token() -> None:
    """Padding entries name token 0 with whatever value."""
    state = load(dirty_state(), 0, [])
    assert not np.asarray(state.token_info_RV[0]).any()
    assert not np.asarray(state.logit_bias_RV[0]).any()


def sample_and_count(
    logits: Any, rows: SamplingRows, state: SamplingState, batch_flags: int = 0
) -> tuple[jax.Array, SamplingState]:
    tokens_S, _ = jitted_sample(jnp.asarray(logits), rows, jnp.int32(batch_flags), state, rows_at_once=1)
    return tokens_S, count_tokens(state, rows, tokens_S, jnp.ones(tokens_S.shape, bool))


def test_only_rows_that_sample_are_counted() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (4, VOCAB)).astype(np.float32)
    before = dirty_state()
    before = SamplingState(before.token_info_RV & 0xFFFF, before.logit_bias_RV)
    flags = [int(RowFlag.SAMPLE), 0, int(RowFlag.SAMPLE | RowFlag.RANDOM), 0]
    rows = make_rows(4, flags=flags, state_rows=[2, 1, 0, 4])  # row 1: an unfinished prompt; row 3: padding
    for batch_flags in range(4):
        tokens, after = sample_and_count(logits, rows, before, batch_flags)
        want = np.asarray(before.token_info_RV).copy()
        want[2, tokens[0]] += 1
        want[0, tokens[2]] += 1
        assert np.array_equal(after.token_info_RV, want)
        assert np.array_equal(after.logit_bias_RV, before.logit_bias_RV)


def test_many_padding_rows_share_the_spare_row() -> None:
    logits = np.zeros((8, VOCAB), np.float32)
    rows = make_rows(8, flags=[int(RowFlag.SAMPLE)] + [0] * 7, state_rows=[0] + [4] * 7)
    _, after = sample_and_count(logits, rows, init_state(ROWS, VOCAB))
    assert int(after.token_info_RV.sum()) == 1
    assert int(after.token_info_RV[0, 0]) == 1


def test_counts_grow_token_by_token() -> None:
    """What sampling counts is what `load_row` would load for the same output (as after a preemption)."""
    state = init_state(ROWS, VOCAB)
    rng = np.random.default_rng(2)
    output = []
    for position in range(40):
        logits = jnp.asarray(np.round(rng.normal(0, 1, (1, VOCAB))), jnp.float32)
        rows = make_rows(1, flags=int(RowFlag.SAMPLE), state_rows=3, positions=position)
        tokens, state = sample_and_count(logits, rows, state)
        output.append(int(tokens[0]))
    assert max(output.count(token) for token in output) > 1
    loaded = load(dirty_state(), 3, [(token, ENTRY_OUTPUT, 0.0) for token in output])
    assert np.array_equal(loaded.token_info_RV[3], state.token_info_RV[3])
