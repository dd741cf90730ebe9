"""Counts of values by size, as histograms in `/metrics` want them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True)
class Distribution:
    """How many values were how large. One thread observes; others may read at any time.

    Attributes:
      bounds: upper bounds of the classes, ascending, inclusive; one more class holds what is above the last.
      counts: values in each class; they only ever grow.
      total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several that are equal."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, values up to it), `+Inf` last. Consistent in itself at any time."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]
