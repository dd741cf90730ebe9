"""Masks of grammars against an independent reference: what they exclude, and that nothing else changes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.batch.masks import mask_words, no_masks
from jaxserve.device.sampling import ENTRY_BIAS, ENTRY_STOP, init_state, unpack_mask
from tests.device.sampling_rows import VOCAB, draw, jitted_sample, make_rows
from tests.device.test_sampling_state import load

MASKED = int(RowFlag.SAMPLE | RowFlag.MASK)
WITH_MASKS = int(BatchFlag.MASK | BatchFlag.RANDOM | BatchFlag.PROCESS_LOGITS)


def pack(allowed_SV: np.ndarray) -> np.ndarray:
    """The packed form, bit by bit."""
    packed = np.zeros((len(allowed_SV), mask_words(allowed_SV.shape[1])), np.uint32)
    for row, token in zip(*np.nonzero(allowed_SV), strict=True):
        packed[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return packed


def sample_with(logits, rows, allowed_SV, *, flags=WITH_MASKS, state=None, rows_at_once=1):
    state = state or init_state(len(logits) + 1, logits.shape[1])
    tokens, finite = jitted_sample(
        jnp.asarray(logits),
        rows,
        jnp.int32(flags),
        state,
        jnp.asarray(pack(allowed_SV)),
        rows_at_once=rows_at_once,
    )
    assert np.asarray(finite).all()
    return np.asarray(tokens)


def random_case(num_rows: int, vocab: int = VOCAB, seed: int = 0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab)).astype(np.float32)
    allowed = rng.random((num_rows, vocab)) < rng.choice([0.02, 0.3, 0.9], (num_rows, 1))
    allowed[np.arange(num_rows), rng.integers(0, vocab, num_rows)] = True
    return logits, allowed


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_packed_bits_are_tokens(vocab):
    _, allowed = random_case(7, vocab)
    np.testing.assert_array_equal(np.asarray(unpack_mask(jnp.asarray(pack(allowed)), vocab)), allowed)
    assert np.asarray(unpack_mask(jnp.asarray(no_masks(3, vocab)), vocab)).all()


def test_greedy_is_the_best_of_those_allowed():
    logits, allowed = random_case(64)
    tokens = sample_with(logits, make_rows(64, flags=MASKED), allowed)
    np.testing.assert_array_equal(tokens, np.where(allowed, logits.astype(np.float64), -np.inf).argmax(-1))


@pytest.mark.parametrize("rows_at_once", [1, 64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 50.0},
        {"top_k": 2},
        {"top_p": 0.05},
        {"min_p": 0.99},
        {"top_k": 1, "top_p": 0.0},
    ],
)
def test_random_draws_are_allowed_and_all_of_them_come(settings, rows_at_once):
    logits, allowed = random_case(64, seed=1)
    flags = int(RowFlag.SAMPLE | RowFlag.MASK | RowFlag.RANDOM)
    rows = make_rows(64, flags=flags, seed=np.arange(64), positions=3, **settings)
    tokens = sample_with(logits, rows, allowed, rows_at_once=rows_at_once)
    assert allowed[np.arange(64), tokens].all()


def test_a_draw_is_that_of_logits_without_the_others():
    """The distribution is the model's over what is allowed: the same as with the others at minus infinity."""
    logits, allowed = random_case(64, seed=2)
    flags = int(RowFlag.SAMPLE | RowFlag.MASK | RowFlag.RANDOM)
    rows = make_rows(64, flags=flags, seed=np.arange(64), positions=9, top_p=0.8)
    cut = np.where(allowed, logits, np.float32(-1e30))
    plain = make_rows(
        64, flags=int(RowFlag.SAMPLE | RowFlag.RANDOM), seed=np.arange(64), positions=9, top_p=0.8
    )
    np.testing.assert_array_equal(sample_with(logits, rows, allowed), draw(cut, plain))


def test_rows_without_a_mask_notice_nothing():
    logits, allowed = random_case(8, seed=3)
    flags = np.array([MASKED, int(RowFlag.SAMPLE)] * 4)
    tokens = sample_with(logits, make_rows(8, flags=flags), allowed)
    np.testing.assert_array_equal(tokens[1::2], logits[1::2].argmax(-1))
    ignored = sample_with(logits, make_rows(8, flags=flags), allowed, flags=int(BatchFlag.PROCESS_LOGITS))
    np.testing.assert_array_equal(ignored, logits.argmax(-1))


def test_nothing_brings_back_what_is_excluded():
    """Bias comes before the mask; a ban gives way only where the mask leaves nothing else."""
    logits = np.zeros((3, VOCAB), np.float32)
    allowed = np.zeros((3, VOCAB), bool)
    allowed[0, [5, 6]] = allowed[1, [7, 8]] = allowed[2, [7]] = True
    state = init_state(4, VOCAB)
    state = load(state, 0, [(20, ENTRY_BIAS, 100.0), (6, ENTRY_BIAS, 1.0)])
    state = load(state, 1, [(7, ENTRY_STOP, 0.0), (40, ENTRY_BIAS, 50.0)])
    state = load(state, 2, [(7, ENTRY_STOP, 0.0), (8, ENTRY_STOP, 0.0)])
    flags = MASKED | int(RowFlag.LOGIT_BIAS | RowFlag.BAN_STOPS)
    tokens = sample_with(logits, make_rows(3, flags=flags), allowed, state=state)
    assert tokens.tolist() == [6, 8, 7]
