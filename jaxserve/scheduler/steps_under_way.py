"""When the steps that have been planned, and whose results have not come, should be through."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepsUnderWay:
    """Belongs to one scheduler. Times are seconds of the engine's clock. Steps run one after the other, in the order
    of their plans."""

    _ends: deque[tuple[int, float]] = field(default_factory=deque)  # (step, when it should be through)

    def planned(self, step_id: int, now: float, seconds: float) -> None:
        """A step is about to be launched that should take so long."""
        begins = max(now, self._ends[-1][1]) if self._ends else now
        self._ends.append((step_id, begins + seconds))

    def done(self, step_id: int) -> None:
        """Its result has come, and with it whatever came before."""
        while self._ends and self._ends[0][0] <= step_id:
            self._ends.popleft()

    def lost(self) -> None:
        """None is under way any more."""
        self._ends.clear()

    def remaining(self, now: float) -> float:
        """Seconds until a step planned now can begin; 0 where the last one should be through already."""
        return max(self._ends[-1][1] - now, 0.0) if self._ends else 0.0
