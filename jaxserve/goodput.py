"""Which requests got the latencies that they asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.outputs import RequestUpdate
from jaxserve.request import FinishReason, Request
from jaxserve.stats import EngineStats


@dataclass(slots=True)
class _Pace:
    """A sequence's tokens so far; times in seconds. `promised`: its first token was predicted to come in time."""

    request: Request
    promised: bool
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class GoodputMeter:
    """Fills in the goodput fields of `EngineStats`, which say what counts. Times are seconds of the engine's clock."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._paces: dict[str, _Pace] = {}

    def add(self, request: Request, *, promised: bool) -> None:
        """Follow a sequence that has been queued."""
        self._paces[request.request_id] = _Pace(request, promised)

    def tokens(self, updates: Iterable[RequestUpdate], now: float) -> None:
        """Tokens have come."""
        for update in updates:
            pace = self._paces.get(update.request.request_id)
            if pace is None or not update.new_token_ids:
                continue
            if not pace.tokens:
                pace.first = now
                if pace.promised:
                    self._count_promise(pace)
            pace.last = now
            pace.tokens += len(update.new_token_ids)

    def ended(self, request_id: str, reason: FinishReason) -> None:
        """A sequence has ended."""
        pace = self._paces.pop(request_id, None)
        if pace is None or reason is FinishReason.ABORT:
            return
        good = reason is not FinishReason.ERROR and _is_within_targets(pace)
        counts = self._stats.within_targets if good else self._stats.outside_targets
        counts[pace.request.service_class.value] += 1

    def _count_promise(self, pace: _Pace) -> None:
        if pace.request.targets.met_by(_ttft(pace), None):
            self._stats.ttft_promises_kept += 1
        else:
            self._stats.ttft_promises_missed += 1


def _ttft(pace: _Pace) -> float:
    return pace.first - pace.request.arrival_time


def _is_within_targets(pace: _Pace) -> bool:
    if not pace.tokens:
        return True  # it wanted none
    mean_itl = (pace.last - pace.first) / (pace.tokens - 1) if pace.tokens > 1 else None
    return pace.request.targets.met_by(_ttft(pace), mean_itl)
