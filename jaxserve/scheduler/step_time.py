"""How long a step takes, learned from the steps just run: for deadlines, chunk sizes, swaps and simulation.

A step's time is taken to be linear in its padded tokens T, its padded rows S, the keys that decoding rows attend to,
and the (query, key) pairs of prefill chunks, plus a constant; the weights are fitted by least squares with
non-negative weights over a fading window. What is particular to a shape (a better or worse tiling) is a factor
of its own. All of it is arithmetic on a few numbers, so that it costs microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whose plans know their work
    from jaxserve.scheduler.output import ScheduledRequest

RoundUp = Callable[[int, int], tuple[int, int]]

_NUM_FEATURES = 5
_FADE = 0.995  # weight of a step after one more: a window of some two hundred steps
_FACTOR_SHARE = 0.1  # of a shape's factor that its newest step decides
_FACTOR_RANGE = (0.5, 2.0)
_MIN_STEPS = 8  # before that nothing is predicted
_REFIT_STEPS = 8  # the fit costs a tenth of a millisecond, so not after each one
_NUM_RECENT = 1024  # newest steps that are kept as they were
_OUTLIER = 3.0  # a step that took more than so many times what was expected counts as that many times


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step has to do.

    Attributes:
      tokens, seqs: scheduled ones, not padded.
      decode_keys: summed over rows of one token: keys that it attends to.
      prefill_pairs: summed over rows of several: (query, key) pairs.
    """

    tokens: int
    seqs: int
    decode_keys: int = 0
    prefill_pairs: int = 0


def work_of(scheduled: Sequence[ScheduledRequest], num_padding_tokens: int = 0) -> StepWork:
    """The work of a plan's rows."""
    # Nearly all rows have one token, and every step is asked for its work: these are summed without a loop in Python.
    starts = [row.num_computed_tokens for row in scheduled if row.num_scheduled_tokens == 1]
    count = len(starts)
    singles = StepWork(num_padding_tokens + count, count, sum(starts) + count)
    return work_of_rows(
        (
            (row.num_computed_tokens, row.num_scheduled_tokens, len(row.draft_token_ids))
            for row in scheduled
            if row.num_scheduled_tokens != 1
        ),
        beside=singles,
    )


def work_of_rows(rows: Iterable[tuple[int, int, int]], *, beside: StepWork) -> StepWork:
    """The work of (computed tokens, tokens to compute, how many of these are drafts) of some rows, and of others."""
    chunks: list[tuple[int, int]] = []
    for start, count, num_drafts in rows:
        if num_drafts:  # rows of one token each
            chunks += [(position, 1) for position in range(start, start + count)]
        else:
            chunks.append((start, count))
    return work_of_chunks(chunks, beside=beside)


def work_of_chunks(chunks: Iterable[tuple[int, int]], *, beside: StepWork) -> StepWork:
    """The work of (computed tokens, tokens to compute) of some rows, those without a token left out, and of others."""
    tokens, seqs = beside.tokens, beside.seqs
    decode_keys, prefill_pairs = beside.decode_keys, beside.prefill_pairs
    for start, count in chunks:
        if not count:
            continue
        tokens += count
        seqs += 1
        if count == 1:
            decode_keys += start + 1
        else:
            prefill_pairs += count * start + count * (count + 1) // 2
    return StepWork(tokens, seqs, decode_keys, prefill_pairs)


@dataclass(frozen=True, slots=True)
class _Factor:
    value: float
    seen_at: int  # number of steps by then


@dataclass(slots=True)
class StepTimeModel:
    """Predicts seconds a step. Belongs to one thread.

    Attributes:
      round_up: (tokens, seqs) -> (T, S) of the shape that such a step runs in.
      num_steps: steps learned from.
      weights: seconds for each feature (1, T, S, decode keys, prefill pairs).
    """

    round_up: RoundUp
    num_steps: int = 0
    weights: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    _factors: dict[tuple[int, int], _Factor] = field(default_factory=dict)
    _products: list[list[float]] = field(
        default_factory=lambda: [[0.0] * (_NUM_FEATURES + 1) for _ in range(_NUM_FEATURES)]
    )
    _fitted_at: int = 0
    _recent: deque[tuple[StepWork, float]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))

    @property
    def is_ready(self) -> bool:
        """Whether enough steps have been seen to predict any."""
        return self.num_steps >= _MIN_STEPS

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds` (> 0) in the shape that `round_up` says."""
        shape = self.round_up(work.tokens, work.seqs)
        features = _features(work, shape)
        scale = seconds
        self._recent.append((work, seconds))
        if self.is_ready:
            expected = self._linear(features)
            if expected > 0:
                known = self._factor(shape)
                seconds = min(seconds, _OUTLIER * expected * known)
                # By what was expected: by what was seen, steps that were quick by chance would count most.
                scale = max(expected * known, seconds / _OUTLIER)
                low, high = _FACTOR_RANGE
                seen = min(max(seconds / expected, low), high)
                self._factors[shape] = _Factor(known + _FACTOR_SHARE * (seen - known), self.num_steps)
        # Relative errors count: a short step's tenth weighs as much as a long one's.
        weight = 1.0 / max(scale, 1e-6) ** 2
        values = (*features, seconds)
        for row, feature in zip(self._products, features, strict=True):
            scaled = weight * feature
            row[:] = [_FADE * old + scaled * value for old, value in zip(row, values, strict=True)]
        self.num_steps += 1
        if self.num_steps == _MIN_STEPS or self.num_steps >= self._fitted_at + _REFIT_STEPS:
            self.weights = _non_negative_least_squares(self._products)
            self._fitted_at = self.num_steps

    def predict(self, work: StepWork) -> float | None:
        """Seconds that a step will take; None before enough have been seen."""
        if not self.is_ready:
            return None
        shape = self.round_up(work.tokens, work.seqs)
        return self._linear(_features(work, shape)) * self._factor(shape)

    def to_dict(self) -> dict[str, Any]:
        """The model as JSON values."""
        return {
            "num_steps": self.num_steps,
            "weights": list(self.weights),
            "factors": [[*shape, self._factor(shape)] for shape in sorted(self._factors)],
            "recent": [
                [work.tokens, work.seqs, work.decode_keys, work.prefill_pairs, seconds]
                for work, seconds in self._recent
            ],
        }

    def ratios(self) -> list[tuple[tuple[int, int], float]]:
        """(shape, actual / predicted time) of the newest steps: how far to trust `predict`, and where it is biased."""
        found = []
        for work, seconds in self._recent:
            predicted = self.predict(work)
            if predicted:
                found.append((self.round_up(work.tokens, work.seqs), seconds / predicted))
        return found

    @classmethod
    def from_dict(cls, value: dict[str, Any], round_up: RoundUp) -> StepTimeModel:
        """A model that predicts as the one that `to_dict` was called on.

        Raises:
          ValueError, KeyError, TypeError: it is none.
        """
        weights = [float(weight) for weight in value["weights"]]
        if len(weights) != _NUM_FEATURES or min(weights) < 0:
            raise ValueError(f"weights must be {_NUM_FEATURES} numbers of at least 0")
        steps = int(value["num_steps"])
        factors = {(int(t), int(s)): _Factor(float(factor), steps) for t, s, factor in value["factors"]}
        recent = [(StepWork(*map(int, row[:4])), float(row[4])) for row in value["recent"]]
        if any(seconds <= 0 for _, seconds in recent):
            raise ValueError("steps must have taken more than 0 seconds")
        return cls(
            round_up, steps, weights, factors, _fitted_at=steps, _recent=deque(recent, maxlen=_NUM_RECENT)
        )

    def _factor(self, shape: tuple[int, int]) -> float:
        """How much longer a shape takes than the weights say. What was seen long ago fades, as for the weights."""
        factor = self._factors.get(shape)
        if factor is None:
            return 1.0
        return 1.0 + (factor.value - 1.0) * _FADE ** (self.num_steps - factor.seen_at)

    def _linear(self, features: tuple[float, ...]) -> float:
        return math.sumprod(self.weights, features)


def _features(work: StepWork, shape: tuple[int, int]) -> tuple[float, ...]:
    return 1.0, float(shape[0]), float(shape[1]), float(work.decode_keys), float(work.prefill_pairs)


def _non_negative_least_squares(products: list[list[float]]) -> list[float]:
    """Weights >= 0 that fit best, from X'X and X'y (last column): the most negative one is left out until none is."""
    used = [i for i in range(_NUM_FEATURES) if products[i][i] > 0]
    while used:
        found = _solve_ridged([[products[i][j] for j in used] + [products[i][-1]] for i in used])
        least = min(range(len(used)), key=found.__getitem__)
        if found[least] >= 0:
            weights = [0.0] * _NUM_FEATURES
            for i, weight in zip(used, found, strict=True):
                weights[i] = weight
            return weights
        del used[least]
    return [0.0] * _NUM_FEATURES


def _solve_ridged(rows: list[list[float]]) -> list[float]:
    """Gaussian elimination of a positive semi-definite system; a trace on the diagonal keeps it definite."""
    size = len(rows)
    # Scaled to a unit diagonal first, since the features differ by orders of magnitude.
    scale = [rows[i][i] ** -0.5 for i in range(size)]
    rows = [
        [rows[i][j] * scale[i] * scale[j] for j in range(size)] + [rows[i][size] * scale[i]]
        for i in range(size)
    ]
    for i in range(size):
        rows[i][i] += 1e-6
    for i in range(size):
        for k in range(i + 1, size):
            ratio = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= ratio * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return [value * factor for value, factor in zip(found, scale, strict=True)]
