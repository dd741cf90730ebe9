"""The random part: what the noise depends on, and that draws follow the law they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve.batch.flags import RowFlag
from jaxserve.device.sampling import SamplingState, gumbel_from_bits, gumbel_noise, init_state
from tests.device.sampling_rows import RANDOM_ROW, VOCAB, draw, make_rows, no_processing

DRAWS = 20_000
noise = jax.jit(gumbel_noise, static_argnums=2)


def words(high: int, low: int) -> jax.Array:
    return jnp.array([high, low], jnp.uint32)


def test_noise_is_finite_for_every_pattern_of_bits() -> None:
    """All 2^23 uniforms there are; low bits are dropped, so they can't matter."""
    convert = jax.jit(gumbel_from_bits)
    got = np.asarray(convert(jnp.arange(2**23, dtype=jnp.uint32) << 9))
    assert np.isfinite(got).all()
    assert (np.diff(got) >= 0).all(), "monotone in the uniform"
    u = (np.arange(2**23) + 0.5) * 2.0**-23
    np.testing.assert_allclose(got, -np.log(-np.log(u)), rtol=2e-4, atol=2e-6)
    ends = np.asarray(convert(jnp.array([0, 511, 2**32 - 512, 2**32 - 1], jnp.uint32)))
    assert np.isfinite(ends).all()
    assert ends[0] == ends[1] == got[0]
    assert ends[2] == ends[3] == got[-1]


def test_noise_is_a_function_of_seed_position_and_id() -> None:
    base = np.asarray(noise(words(1, 2), jnp.int32(3), 300))
    assert np.array_equal(base, noise(words(1, 2), jnp.int32(3), 300))
    for other in (
        noise(words(2, 1), jnp.int32(3), 300),
        noise(words(0, 2), jnp.int32(3), 300),
        noise(words(1, 0), jnp.int32(3), 300),
        noise(words(1, 2), jnp.int32(4), 300),
        noise(words(2**32 - 1, 2**32 - 1), jnp.int32(2**31 - 1), 300),
    ):
        assert (np.asarray(other) != base).mean() > 0.99
        assert abs(np.corrcoef(base, np.asarray(other))[0, 1]) < 0.2
    assert np.array_equal(noise(words(1, 2), jnp.int32(3), 77), base[:77]), (
        "the vocabulary's size shifts nothing"
    )


def test_noise_has_the_gumbel_law() -> None:
    many = jax.jit(jax.vmap(lambda p: gumbel_noise(words(5, 6), p, 200)))(jnp.arange(500))
    assert stats.kstest(np.asarray(many, np.float64).ravel(), "gumbel_r").pvalue > 1e-3
    assert len(np.unique(np.asarray(many)[:, 0])) > 490, "positions repeat the noise"


@pytest.mark.parametrize(("num_rows", "groups"), [(1, [64]), (7, [2, 7, 64])])
def test_rows_worked_on_together_change_nothing(num_rows: int, groups: list[int]) -> None:
    rng = np.random.default_rng(num_rows)
    logits = rng.normal(0, 2, (num_rows, VOCAB)).astype(np.float32)
    rows = make_rows(
        num_rows,
        flags=np.where(np.arange(num_rows) % 3 == 2, int(RowFlag.SAMPLE), RANDOM_ROW),
        seed=rng.integers(0, 2**63, num_rows),
        positions=rng.integers(0, 9999, num_rows),
        temperature=rng.uniform(0.2, 2, num_rows),
        top_k=rng.choice([0, 1, 10], num_rows),
        top_p=rng.choice([0.3, 0.9, 1.0], num_rows),
        min_p=rng.choice([0, 0.05], num_rows),
    )
    one = no_processing(logits, rows, rows_at_once=1)
    for together in groups:
        assert np.array_equal(no_processing(logits, rows, rows_at_once=together), one), together


def law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """float64 probabilities that a draw must follow."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x)
    p = np.exp(x - x.max())
    keep = np.ones(len(x), bool)
    if top_k:
        keep[order[top_k:]] = False
    reached = np.cumsum(np.where(keep, p, 0)[order]) / p[keep].sum()
    keep[order[np.searchsorted(reached, top_p - 1e-9) + 1 :]] = False
    keep &= p >= min_p
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 8, 0.9, 0.02),
    ],
)
def test_draws_follow_the_filtered_softmax(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(11).normal(0, 1.2, 16).astype(np.float32)
    rows = make_rows(
        DRAWS,
        state_rows=0,
        flags=RANDOM_ROW,
        seed=np.arange(DRAWS) * 2**20 + 7,
        positions=5,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    tokens = no_processing(np.tile(logits, (DRAWS, 1)), rows, state=init_state(1, 16), rows_at_once=DRAWS)
    p = law(logits, temperature, top_k, top_p, min_p)
    counts = np.bincount(tokens, minlength=16)
    assert counts[p == 0].sum() == 0, "an excluded token was drawn"
    assert stats.chisquare(counts[p > 0], DRAWS * p[p > 0]).pvalue > 1e-3


def test_draws_at_consecutive_positions_are_independent() -> None:
    """One request's tokens: the same seed, one position after the other."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    rows = make_rows(DRAWS, state_rows=0, flags=RANDOM_ROW, seed=2**64 - 1, positions=np.arange(DRAWS))
    tokens = no_processing(np.tile(logits, (DRAWS, 1)), rows, state=init_state(1, 4), rows_at_once=DRAWS)
    assert stats.chisquare(np.bincount(tokens), DRAWS * np.array([0.4, 0.3, 0.2, 0.1])).pvalue > 1e-3
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (tokens[::2], tokens[1::2]), 1)
    assert stats.chi2_contingency(pairs).pvalue > 1e-3


@pytest.mark.parametrize("odds", [0.0, 3.0])
def test_two_allowed_tokens_share_and_no_other_is_ever_drawn(odds: float) -> None:
    """A bias of -100 on all but two of many tokens; equal ones half and half, else by their odds."""
    total = 3 * DRAWS
    state = init_state(1, VOCAB)
    bias = jnp.full((1, VOCAB), -100.0).at[0, jnp.array([5, 60])].set(0.0)
    state = SamplingState(state.token_info_RV, bias)
    logits = np.zeros((total, VOCAB), np.float32)
    logits[:, 60] = odds
    flags = RANDOM_ROW | int(RowFlag.LOGIT_BIAS)
    rows = make_rows(total, state_rows=0, flags=flags, seed=np.arange(total))
    counts = np.bincount(draw(logits, rows, state=state, rows_at_once=total), minlength=VOCAB)
    assert counts[5] + counts[60] == total
    share = 1 / (1 + np.exp(odds))
    assert stats.binomtest(int(counts[5]), total, share).pvalue > 1e-3
