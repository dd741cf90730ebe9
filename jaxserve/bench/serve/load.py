"""How requests come: when each is sent, and how many may be under way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.bench.peers.client import arrival_times
from jaxserve.errors import ConfigError
from jaxserve.workload.traced_request import Workload


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """Attributes:
    rate: requests a second; None: all at once, or as the workload says.
    burstiness: see `workload.arrivals.Arrivals`.
    concurrency: most requests under way; None is any number.
    recorded: requests come when the workload says, so many times as fast; None: they don't.
    seed: of the times between arrivals.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    recorded: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.recorded is not None:
            raise ConfigError("--rate and --recorded contradict each other: give one")

    def arrivals(self, workload: Workload) -> tuple[float, ...]:
        """Seconds from the beginning. Raises: ConfigError: the rate makes no sense."""
        if self.recorded is not None:
            times = [item.arrival for item in workload.faster(self.recorded).requests]
            return tuple(time - times[0] for time in times)
        count = len(workload.requests)
        return arrival_times(count, rate=self.rate, seed=self.seed, burstiness=self.burstiness)

    def describe(self) -> str:
        """For people, and to tell points of a sweep apart."""
        when = "all at once"
        if self.recorded is not None:
            when = f"as recorded, {self.recorded:g} times as fast"
        elif self.rate is not None:
            when = f"{self.rate:g} requests/s, burstiness {self.burstiness:g}"
        return when if self.concurrency is None else f"{when}, {self.concurrency} under way"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
