"""What comes out of speculation is distributed as the target says, and drafts are accepted as often as theory says.

A model here is a table: what follows depends on the token before alone. Drafts and targets are drawn by the step's own
`sample`, and accepted by its own `accepted_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import jax
import numpy as np
import pytest
from scipy import stats

from jaxserve.device.verification import accepted_rows
from tests.device.sampling_rows import RANDOM_ROW, make_rows, no_processing

pytestmark = pytest.mark.usefixtures("quick_to_compile")

VOCAB, NUM_DRAFTS, LENGTH, DRAWS = 4, 2, 3, 20_000
TEMPERATURE = 0.8
accepted = jax.jit(accepted_rows)


def tables(seed: int, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits [V, V] of what follows each token: the target's, and a draft's that is so far from it."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
    return target, (target + rng.normal(0, distance, target.shape)).astype(np.float32)


def sample_rows(
    logits: np.ndarray, seeds: np.ndarray, positions: np.ndarray, temperature: float = TEMPERATURE
) -> np.ndarray:
    rows = make_rows(
        len(seeds),
        seed=seeds,
        positions=positions,
        flags=RANDOM_ROW,
        temperature=temperature,
        state_rows=np.zeros(len(seeds)),
    )
    return no_processing(logits, rows, rows_at_once=4096)


Keys = Callable[
    [np.ndarray, int], np.ndarray
]  # (positions of rows, drafts before them) -> what keys their noise


def by_position(positions: np.ndarray, _: int) -> np.ndarray:
    return positions


def by_row(_: np.ndarray, place: int) -> np.ndarray:
    """Wrong: each step uses the noise of the one before again."""
    return np.full(DRAWS, 1 + place)


def speculate(
    target: np.ndarray, draft: np.ndarray, *, target_keys: Keys = by_position, believe: bool = False
) -> tuple[np.ndarray, float]:
    """(the first LENGTH tokens of each request, share of first drafts that are accepted)

    Args:
      target_keys: what the target's noise depends on.
      believe: wrong: a draft stands although the target would have drawn another token.
    """
    seeds = np.arange(DRAWS, dtype=np.uint64) + 2**40
    tokens = np.zeros((DRAWS, LENGTH + NUM_DRAFTS + 1), np.int64)
    counts = np.zeros(DRAWS, np.int64)
    last = np.zeros(DRAWS, np.int64)
    first_accepted: list[float] = []
    everybody = np.arange(DRAWS)
    while counts.min() < LENGTH:
        drafts, token = [], last
        for place in range(NUM_DRAFTS):
            token = sample_rows(draft[token], seeds, counts + 1 + place)
            drafts.append(token)
        inputs = np.stack([last, *drafts], axis=1)  # row j of a request holds its j-th draft
        keys = np.stack([target_keys(counts + 1 + j, j) for j in range(1 + NUM_DRAFTS)], axis=1)
        sampled = sample_rows(target[inputs.ravel()], np.repeat(seeds, 1 + NUM_DRAFTS), keys.ravel())
        rows = make_rows(
            sampled.size,
            draft_indices=np.tile(np.arange(1 + NUM_DRAFTS), DRAWS),
            draft_ids=(inputs * (np.arange(1 + NUM_DRAFTS) > 0)).ravel(),
        )
        stands = np.asarray(accepted(sampled, rows)).reshape(DRAWS, -1)
        outcome = sampled.reshape(DRAWS, -1)
        if believe:
            outcome = np.concatenate([inputs[:, 1:], outcome[:, -1:]], axis=1)
            stands = np.ones_like(stands)
        first_accepted.append(float(stands[:, 1].mean()))
        open_ = counts < LENGTH
        for j in range(1 + NUM_DRAFTS):
            writes = everybody[open_ & stands[:, j]]
            tokens[writes, counts[writes]] = outcome[writes, j]
            last[writes] = outcome[writes, j]
            counts[writes] += 1
            open_ &= counts < LENGTH
    return tokens[:, :LENGTH], first_accepted[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) / TEMPERATURE)
    return weights / weights.sum(-1, keepdims=True)


def p_value(tokens: np.ndarray, target: np.ndarray) -> float:
    """Of a chi-square test against the target's law of whole sequences."""
    law = softmax(target)
    expected, seen = [], []
    for sequence in product(range(VOCAB), repeat=LENGTH):
        chance = np.prod([law[a, b] for a, b in zip((0, *sequence), sequence, strict=False)])
        expected.append(DRAWS * chance)
        seen.append((tokens == sequence).all(1).sum())
    order = np.argsort(expected)
    few = np.cumsum(np.array(expected)[order]) < 10  # together one cell
    cells = [order[few], *([at] for at in order[~few])] if few.any() else [[at] for at in order]
    expected = [sum(expected[at] for at in cell) for cell in cells]
    seen = [sum(seen[at] for at in cell) for cell in cells]
    if few.any() and expected[0] < 5:
        expected[1] += expected.pop(0)
        seen[1] += seen.pop(0)
    return float(stats.chisquare(seen, np.array(expected) * DRAWS / sum(expected)).pvalue)


@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0])
def test_the_law_is_the_targets(distance: float) -> None:
    target, draft = tables(1, distance)
    tokens, _ = speculate(target, draft)
    assert p_value(tokens, target) > 1e-3


def test_this_test_sees_what_is_wrong() -> None:
    """Noise that is used again by the next step; drafts that stand although the target differs; another model."""
    target, draft = tables(1, 0.5)
    again, _ = speculate(target, draft, target_keys=by_row)
    assert p_value(again, target) < 1e-9
    believed, _ = speculate(target, draft, believe=True)
    assert p_value(believed, target) < 1e-9
    right, _ = speculate(target, draft)
    assert p_value(right, draft) < 1e-9


def shared_noise_acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that both draw the same token with the same Gumbel noise (arXiv 2408.07978, theorem 1)."""
    ratios = np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1 / ratios.sum(1)).sum())


@pytest.mark.parametrize("distance", [0.3, 1.0, 3.0])
def test_drafts_with_the_targets_noise_are_accepted_as_often_as_they_should_be(distance: float) -> None:
    target, draft = tables(2, distance)
    p, q = softmax(target[0]), softmax(draft[0])
    total_variation = 0.5 * np.abs(p - q).sum()
    _, rate = speculate(target, draft)
    expected = shared_noise_acceptance(p, q)
    assert rate == pytest.approx(expected, abs=4 * np.sqrt(0.25 / DRAWS))
    assert (1 - total_variation) / (1 + total_variation) - 1e-9 <= expected <= 1 - total_variation + 1e-9
    # With noise of another position they would have to agree by chance.
    _, by_chance = speculate(target, draft, target_keys=lambda positions, _: positions + 1000)
    assert by_chance == pytest.approx(float(p @ q), abs=4 * np.sqrt(0.25 / DRAWS))
    assert by_chance < expected - 0.05
