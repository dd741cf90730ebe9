"""Which rows count, against a plain walk from row to row; penalties within a draft against one token after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.device.sampling import count_tokens, init_state
from jaxserve.device.verification import accepted_rows, last_accepted_rows
from tests.device.sampling_rows import RANDOM_ROW, VOCAB, draw, jitted_sample, make_rows

NUM_ROWS = 12


@jax.jit
def verify(token_ids_S, rows):
    accepted_S = accepted_rows(token_ids_S, rows)
    return accepted_S, last_accepted_rows(accepted_S, rows)


@settings(max_examples=80)
@given(data=st.data())
def test_a_draft_counts_while_all_before_it_do(data: st.DataObject) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(0, 2), min_size=NUM_ROWS, max_size=NUM_ROWS)), np.int32)
    indices: list[int] = []
    while len(indices) < NUM_ROWS:
        indices += range(min(data.draw(st.integers(1, 5)), NUM_ROWS - len(indices)))
    drafts = [data.draw(st.integers(0, 2)) if index else 0 for index in indices]
    accepted, last = verify(jnp.asarray(tokens), make_rows(NUM_ROWS, draft_indices=indices, draft_ids=drafts))
    want = []
    for s, index in enumerate(indices):
        want.append(index == 0 or (want[s - 1] and drafts[s] == tokens[s - 1]))
    assert accepted.tolist() == want
    ends = [
        s for s in range(NUM_ROWS) if want[s] and not (s + 1 < NUM_ROWS and indices[s + 1] and want[s + 1])
    ]
    assert np.flatnonzero(last).tolist() == ends
    assert len(ends) == indices.count(0), "one end a request"


@pytest.mark.parametrize("random", [False, True])
def test_penalties_see_the_drafts_before(random: bool) -> None:
    """B166: each position's sample is that of a step of its own, with the tokens before it counted."""
    rng = np.random.default_rng(3)
    length = 7
    logits = np.round(rng.normal(0, 1, (length, VOCAB)), 1).astype(np.float32)
    fields = {
        "flags": (RANDOM_ROW if random else int(RowFlag.SAMPLE)) | int(RowFlag.PENALTIES),
        "presence_penalty": 1.2,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "seed": 11,
    }
    state, sampled = init_state(3, VOCAB), []
    batch_flags = int(BatchFlag.PROCESS_LOGITS) | (int(BatchFlag.RANDOM) if random else 0)
    for at in range(length):
        rows = make_rows(1, state_rows=[1], positions=at, **fields)
        tokens = draw(logits[at : at + 1], rows, state=state, batch_flags=batch_flags)
        state = count_tokens(state, rows, jnp.asarray(tokens), jnp.ones(1, bool))
        sampled.append(int(tokens[0]))
    for wrong_at in (None, 1, 4):
        drafts = [0, *sampled[:-1]]
        if wrong_at is not None:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
        rows = make_rows(
            length,
            state_rows=[1] * length,
            positions=np.arange(length),
            draft_indices=np.arange(length),
            draft_ids=drafts,
            **fields,
        )
        tokens, _ = jitted_sample(
            jnp.asarray(logits), rows, jnp.int32(batch_flags), init_state(3, VOCAB), rows_at_once=1
        )
        accepted, last = verify(tokens, rows)
        count = length if wrong_at is None else wrong_at
        assert int(accepted.sum()) == count
        assert np.asarray(tokens)[:count].tolist() == sampled[:count]
        assert int(np.flatnonzero(last)[0]) == count - 1
        counted = count_tokens(init_state(3, VOCAB), rows, tokens, accepted).token_info_RV
        assert np.array_equal(counted[1], np.bincount(sampled[:count], minlength=VOCAB))
        assert not np.asarray(counted)[[0, 2]].any()
