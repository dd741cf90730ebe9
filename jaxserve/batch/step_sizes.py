"""How large steps are: limits, and distributions over (tokens, sequences) that shapes are planned for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

StepSize = tuple[int, int]  # tokens, sequences


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: `max_num_batched_tokens` and `max_num_seqs`, each at least 1."""

    max_tokens: int
    max_seqs: int

    def allow(self, tokens: int, seqs: int) -> bool:
        """Whether a step can have that size."""
        return 1 <= tokens <= self.max_tokens and 1 <= seqs <= min(tokens, self.max_seqs)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """A distribution: weight of each (tokens, sequences), in any unit (steps counted, or shares).

    Tokens are all that a step computes on purpose, before a bucket pads it.
    """

    weights: Mapping[StepSize, float]

    @property
    def total(self) -> float:
        return sum(self.weights.values())

    def mixed_with(self, other: StepSizes, share: float) -> StepSizes:
        """A distribution of total 1, of which `share` comes from `other`."""
        weights: defaultdict[StepSize, float] = defaultdict(float)
        for sizes, part in ((self, 1 - share), (other, share)):
            for size, weight in sizes.weights.items():
                weights[size] += weight * part / sizes.total
        return StepSizes({size: weight for size, weight in weights.items() if weight > 0})


def typical_steps(limits: StepLimits) -> StepSizes:
    """What to expect of a server of which nothing is known; total 1.

    A number of running sequences is as likely between 1 and 2 as between 32 and 64 (weight 1 / s). In half of the
    steps all of them decode, in a quarter prompts fill the step to its limit, and in a quarter a prompt's
    remainder, of any order of magnitude as well, stands beside them.
    """
    weights: defaultdict[StepSize, float] = defaultdict(float)
    for seqs, share in _log_uniform(limits.max_seqs).items():
        weights[seqs, seqs] += share / 2
        weights[limits.max_tokens, seqs] += share / 4
        for extra, part in _log_uniform(limits.max_tokens - seqs).items():
            weights[seqs + extra, seqs] += share / 4 * part
    return StepSizes(dict(weights))


def _log_uniform(most: int) -> dict[int, float]:
    """Shares of 1..most with density 1 / value, total 1; past the first few, one value stands for its neighbours."""
    if most < 1:
        return {0: 1.0}
    values = {round(2 ** (eighths / 8)) for eighths in range(8 * most.bit_length())}
    ascending = [*sorted(value for value in values if value < most), most]
    shares = {value: math.log((value + 0.5) / (below + 0.5)) for below, value in pairwise([0, *ascending])}
    total = sum(shares.values())
    return {value: share / total for value, share in shares.items()}
