"""Percentiles of the times seen in the last minute: for a view that people watch, where `/metrics` has histograms."""

from __future__ import annotations

from collections import deque

from jaxserve.engine_view import Percentiles

WINDOW_SECONDS = 60.0
MAX_TIMES = 2048


class RecentTimes:
    """The newest `MAX_TIMES` times of the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)  # (when seen, seconds)

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """So many were seen now (seconds of any one clock)."""
        self._times.extend([(now, seconds)] * count)

    def percentiles(self, now: float) -> Percentiles:
        """Of what is left in the window; the nearest rank, so each is a time that was seen."""
        while self._times and self._times[0][0] < now - WINDOW_SECONDS:
            self._times.popleft()
        if not self._times:
            return Percentiles(0)
        ordered = sorted(seconds for _, seconds in self._times)
        count = len(ordered)
        at = lambda percent: ordered[-(-count * percent // 100) - 1]  # noqa: E731
        return Percentiles(count, at(50), at(90), at(99))
