"""What of an engine's counters a circuit breaker wants to know, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.server.circuit_breaker import CircuitBreaker
from jaxserve.stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineNews:
    """Of one step.

    Attributes:
      failed: the device failed at it; worked: it did not, after one that had failed.
      kept, missed: first tokens that came in the promised time, and after it.
    """

    failed: bool
    worked: bool
    kept: int
    missed: int

    def tell(self, breaker: CircuitBreaker) -> None:
        """Pass it on."""
        if self.failed:
            breaker.step_failed()
        if self.worked:
            breaker.step_worked()
        breaker.first_tokens(self.kept, self.missed)


class EngineWatch:
    """Compares counters with those of the last look. Used by the engine's thread."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._seen = self._counts()

    def look(self) -> EngineNews | None:
        """What the last step has changed; None where there is nothing to say."""
        before, now = self._seen, self._counts()
        if now == before:
            return None
        self._seen = now
        return EngineNews(
            failed=now[0] > before[0],
            worked=bool(before[1]) and not now[1],
            kept=now[2] - before[2],
            missed=now[3] - before[3],
        )

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self._stats
        return (
            stats.step_failures,
            stats.step_failures_in_a_row,
            stats.ttft_promises_kept,
            stats.ttft_promises_missed,
        )
