"""The shapes that waste least: chosen exactly, by dynamic programming over expected padding.

A plan is a list of token sizes T, ascending, each with its row counts S, ascending. A step goes to the smallest T that
holds its tokens, and of that T to the smallest S that holds its sequences. So the T alone split the steps into
intervals, and each interval is a problem of its own over S: two nested shortest paths, which is what makes the
optimum cheap to find. The last T and the last S of each T are given (the limits), so every step has a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.batch.step_sizes import StepLimits, StepSizes

MIN_SIZE = 2  # one row alone collapses to a slow matrix-vector path on CPUs, in the layers (T) and in the LM head (S)

Shapes = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Resolution:
    """All sizes that occur are candidates if there are at most so many, else the heaviest and a logarithmic grid."""

    at_most: int
    per_octave: int


_TOKENS = _Resolution(at_most=128, per_octave=8)
_ROWS = _Resolution(at_most=24, per_octave=3)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs, in units of one token's way through the layers: `fixed` + T + `row` * S.

    Attributes:
      fixed: reading the weights and everything else that no shape changes. It moves no size, but says how much padding
        matters: of a step's time, not of its tokens.
      row: one row of logits (the LM head and sampling): about vocabulary * hidden width / parameters of the layers.
    """

    fixed: float = 20.0
    row: float = 0.25

    def of(self, tokens: float, seqs: float) -> float:
        return self.fixed + tokens + self.row * seqs


def top_rows(tokens: int, limits: StepLimits) -> int:
    """Most rows that a batch of T tokens can need: the S that every T must have."""
    return min(tokens, max(MIN_SIZE, limits.max_seqs))


def best_plans(
    sizes: StepSizes,
    limits: StepLimits,
    *,
    max_shapes: int,
    cost: StepCost = StepCost(),
    max_rows_per_size: int = 4,
) -> PlanTable:
    """Plans of least expected cost.

    Exact among plans with at most `max_rows_per_size` row counts for a T, as long as the steps have at most 128
    different token counts and 24 different sequence counts; beyond that, sizes are chosen from the heaviest of
    them and a logarithmic grid.

    Args:
      sizes: within the limits; total weight above 0.
      max_shapes: the compile budget: most (T, S) pairs, at least 1.

    Source: the one-dimensional case is the optimal histogram (V-optimal partition) problem; O(candidates^2 * budget).
    """
    problem = _Problem.make(sizes, limits)
    num_sizes = len(problem.tokens)
    most_rows = min(max_rows_per_size, max_shapes)
    # best[k, j]: least cost of all steps up to token size j - 1, itself a T of the plan, with exactly k shapes.
    best = np.full((max_shapes + 1, num_sizes + 1), np.inf)
    best[0, 0] = 0.0
    # came_from[k, j]: the previous j, and row counts spent on the last T.
    came_from = np.zeros((max_shapes + 1, num_sizes + 1, 2), np.int64)
    for j in range(num_sizes):
        segment = problem.segment_costs(j, cost, most_rows)  # [previous, row counts - 1]
        for rows in range(1, most_rows + 1):
            total = best[: max_shapes + 1 - rows, : j + 1] + segment[:, rows - 1]  # [shapes before, previous]
            previous = total.argmin(1)
            least = np.take_along_axis(total, previous[:, None], 1)[:, 0]
            better = np.flatnonzero(least < best[rows:, j + 1])
            best[rows + better, j + 1] = least[better]
            came_from[rows + better, j + 1, 0] = previous[better]
            came_from[rows + better, j + 1, 1] = rows
    return PlanTable(problem, best[1:, num_sizes], came_from)


class PlanTable:
    """The best plan for every number of shapes up to a budget.

    Attributes:
      costs: [k - 1] expected cost a step (`StepCost`'s unit) of the best plan of at most k shapes.
    """

    def __init__(self, problem: _Problem, exact: np.ndarray, came_from: np.ndarray) -> None:
        """`exact`: [k - 1] cost of the best plan of exactly k shapes."""
        self._problem = problem
        self._came_from = came_from
        self._num_shapes: list[int] = []  # [k - 1] of the best plan of at most k
        costs: list[float] = []
        for k, cost in enumerate(exact.tolist(), start=1):
            # A gain below rounding is none: fewer shapes start faster.
            is_gain = not costs or cost < costs[-1] * (1 - 1e-12)
            costs.append(cost if is_gain else costs[-1])
            self._num_shapes.append(k if is_gain else self._num_shapes[-1])
        self.costs = tuple(costs)

    def plan(self, max_shapes: int) -> Shapes:
        """The best plan of at most so many shapes, within the budget; fewer where more would gain nothing."""
        return self._problem.trace_back(self._came_from, self._num_shapes[max_shapes - 1])


@dataclass(frozen=True, slots=True)
class _Problem:
    """Steps by candidate sizes.

    Attributes:
      tokens: [J] candidates for T, ascending; the last is the limit.
      seqs: [R] candidates for S below the limit, ascending.
      top: [J] the S that must be there for each T.
      mass: [J + 1, R + 1] weight of the steps with T among the first j candidates and S among the first r;
        the last column counts all rows.
    """

    tokens: np.ndarray
    seqs: np.ndarray
    top: np.ndarray
    mass: np.ndarray

    @classmethod
    def make(cls, sizes: StepSizes, limits: StepLimits) -> _Problem:
        pairs = np.maximum(np.array(list(sizes.weights), np.int64), MIN_SIZE)
        weights = np.array(list(sizes.weights.values()), np.float64)
        weights /= weights.sum()
        most = max(MIN_SIZE, limits.max_tokens)
        tokens = _candidates(pairs[:, 0], weights, most, _TOKENS)
        most_rows = top_rows(most, limits)
        seqs = _candidates(pairs[:, 1], weights, most_rows, _ROWS)[:-1]
        mass = np.zeros((len(tokens) + 1, len(seqs) + 2))
        at = np.searchsorted(tokens, pairs[:, 0]), np.searchsorted(seqs, pairs[:, 1])
        np.add.at(mass, (at[0] + 1, at[1] + 1), weights)
        mass = mass.cumsum(0).cumsum(1)
        return cls(tokens, seqs, np.minimum(tokens, most_rows), mass)

    def segment_costs(self, j: int, cost: StepCost, most_rows: int) -> np.ndarray:
        """[j + 1, most_rows]: cost of giving T = tokens[j] to all steps above each previous T, with so many S."""
        weight = self.mass[j + 1] - self.mass[: j + 1]  # [previous, R + 2], cumulative over rows
        total = weight[:, -1]
        rows = self._row_costs(weight, int(self.top[j]), most_rows)[0]
        # A row that costs nothing times a number of row counts that can't be would be NaN.
        rows = np.where(np.isinf(rows), np.inf, cost.row * np.where(np.isinf(rows), 0.0, rows))
        return (cost.fixed + float(self.tokens[j])) * total[:, None] + rows

    def _row_costs(self, weight: np.ndarray, top: int, most_rows: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Least sums of weight * S with 1..most_rows row counts, the last of them `top`.

        Returns:
          [previous, most_rows], inf where there are not so many row counts; and for each number of row counts n the
          table [previous, r] of the best cost of the rows up to seqs[r - 1], itself the n-th S (r = 0: no S yet).
        """
        num_below = int(np.searchsorted(self.seqs, top))  # candidates below the top
        covered = weight[:, : num_below + 1]
        sizes = np.concatenate(([0], self.seqs[:num_below])).astype(np.float64)
        reached = np.full_like(covered, np.inf)
        reached[:, 0] = 0.0
        # step[p, a, b]: cost of S = sizes[b] for the rows above sizes[a]
        not_ascending = np.where(np.triu(np.ones((num_below + 1, num_below + 1), bool), 1), 0.0, np.inf)
        step = sizes * (covered[:, None, :] - covered[:, :, None]) + not_ascending
        tables = [reached]
        for _ in range(most_rows - 1):
            reached = (reached[:, :, None] + step).min(1)
            tables.append(reached)
        above = top * (weight[:, -1:] - covered)
        return np.stack([(table + above).min(1) for table in tables], 1), tables

    def trace_back(self, came_from: np.ndarray, num_shapes: int) -> Shapes:
        shapes: list[tuple[int, tuple[int, ...]]] = []
        k, j = num_shapes, len(self.tokens)
        while j > 0:
            previous, rows = map(int, came_from[k, j])
            weight = (self.mass[j] - self.mass[previous])[None]
            shapes.append((int(self.tokens[j - 1]), self._best_rows(weight, int(self.top[j - 1]), rows)))
            k, j = k - rows, previous
        return tuple(reversed(shapes))

    def _best_rows(self, weight: np.ndarray, top: int, num_rows: int) -> tuple[int, ...]:
        tables = self._row_costs(weight, top, num_rows)[1]
        num_below = tables[0].shape[1] - 1
        covered = weight[0, : num_below + 1]
        sizes = np.concatenate(([0], self.seqs[:num_below]))
        chosen, end = [top], num_below + 1
        for n in range(num_rows - 1, 0, -1):
            # The next larger S costs S * (all up to it - covered here); what is the same for all choices is left out.
            costs = tables[n][0] - chosen[-1] * covered
            end = int(costs[:end].argmin())
            chosen.append(int(sizes[end]))
        return tuple(reversed(chosen))


def _candidates(values: np.ndarray, weights: np.ndarray, most: int, resolution: _Resolution) -> np.ndarray:
    """Sizes worth having, ascending, `most` always the last: the optimum rounds nothing up past a size that occurs."""
    found, index = np.unique(values, return_inverse=True)
    if len(found) > resolution.at_most:
        octaves = np.arange(resolution.per_octave, np.log2(most) * resolution.per_octave)
        grid = np.unique(np.round(2.0 ** (octaves / resolution.per_octave)).astype(np.int64))
        heaviest = np.argsort(-np.bincount(index, weights), kind="stable")
        found = np.union1d(found[heaviest[: max(0, resolution.at_most - len(grid))]], grid)
    return np.union1d(found, [most]).astype(np.int64)
