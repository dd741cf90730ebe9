"""When the steps that have been planned, and whose results have not come, should be through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.scheduler.step_time import StepWork


@dataclass(slots=True)
class StepsUnderWay:
    """Belongs to one scheduler. Times are seconds of the engine's clock. Steps run one after the other, in the order
    of their plans."""

    _plans: deque[tuple[SchedulerOutput, float]] = field(default_factory=deque)  # and when each was made

    def planned(self, plan: SchedulerOutput, now: float) -> None:
        """A step is about to be launched."""
        self._plans.append((plan, now))

    def done(self, step_id: int) -> None:
        """Its result has come, and with it whatever came before."""
        while self._plans and self._plans[0][0].step_id <= step_id:
            self._plans.popleft()

    def lost(self) -> None:
        """None is under way any more."""
        self._plans.clear()

    def remaining(self, now: float, predict: Callable[[StepWork], float | None]) -> float:
        """Seconds until a step planned now can begin; 0 where the last one should be through already.

        Args:
          predict: seconds that a step takes; None where nothing is known, which counts as 0.
        """
        end = now
        for at, (plan, planned) in enumerate(self._plans):
            end = (max(end, planned) if at else planned) + (predict(plan.work) or 0.0)
        return max(end - now, 0.0)
