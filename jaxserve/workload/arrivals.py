"""When requests arrive, and how long they are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A renewal process, with or without pauses.

    Attributes:
      rate: mean requests a second, pauses included.
      burstiness: standard deviation / mean of the times between arrivals, which are gamma-distributed. 1 is a Poisson
        process; beyond that requests come in clusters; 0 is a steady beat.
      on_seconds, off_seconds: mean length of the busy times and of the pauses between them, each exponentially
        distributed; no pauses where `off_seconds` is 0. All requests come in the busy times, so much the faster.
    """

    rate: float
    burstiness: float = 1.0
    on_seconds: float = 10.0
    off_seconds: float = 0.0

    def __post_init__(self) -> None:
        _require(1e-9 <= self.rate <= 1e9, f"rate must be between 1e-9 and 1e9, got {self.rate:g}")
        _require(0 <= self.burstiness <= 20, f"burstiness must be between 0 and 20, got {self.burstiness:g}")
        _require(
            1e-3 <= self.on_seconds <= 1e9,
            f"on_seconds must be between 1e-3 and 1e9, got {self.on_seconds:g}",
        )
        _require(
            0 <= self.off_seconds <= 1e9,
            f"off_seconds must be between 0 and 1e9, got {self.off_seconds:g}",
        )

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds from the start, ascending, without end."""
        rate = self.rate * (self.on_seconds + self.off_seconds) / self.on_seconds
        busy = paused = 0.0
        busy_until = rng.expovariate(1 / self.on_seconds) if self.off_seconds else math.inf
        while True:
            busy += self._gap(rng, rate)
            while busy > busy_until:
                paused += rng.expovariate(1 / self.off_seconds)
                busy_until += rng.expovariate(1 / self.on_seconds)
            yield busy + paused

    def _gap(self, rng: random.Random, rate: float) -> float:
        if self.burstiness < 1e-6:  # its square is nothing to divide by
            return 1 / rate
        variance = self.burstiness**2
        return rng.gammavariate(1 / variance, variance / rate)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal numbers of tokens: exp(log(median) + sigma * standard normal), cut to `least..most`."""

    median: float
    sigma: float
    least: int = 1
    most: int = 2**31 - 1

    def __post_init__(self) -> None:
        _require(
            0 < self.median < math.inf,
            f"the median of a length must be a number above 0, got {self.median:g}",
        )
        _require(0 <= self.sigma <= 10, f"the sigma of a length must be between 0 and 10, got {self.sigma:g}")
        _require(1 <= self.least <= self.most, f"a length can't be in {self.least}..{self.most}")

    def draw(self, rng: random.Random) -> int:
        return min(max(round(rng.lognormvariate(math.log(self.median), self.sigma)), self.least), self.most)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)
