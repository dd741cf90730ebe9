"""Predicted times to first token against actual ones: what predictions are corrected by, and how good they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.stats import EngineStats

_SHARE = 0.1  # of the correction that the newest request decides
_RANGE = (0.25, 4.0)
_HALF_LIFE = 30.0  # seconds after which half of a correction is forgotten, unless it is confirmed
_STALE = 60.0  # seconds after which an idle engine's knowledge counts as none


@dataclass(frozen=True, slots=True)
class _Expected:
    arrival: float
    made_at: float
    raw: float  # seconds from `made_at`, uncorrected
    predicted: float  # seconds from the arrival, corrected


@dataclass(slots=True)
class TtftRecord:
    """Belongs to one scheduler. All times are seconds of the engine's clock.

    What is learned fades: requests refused because of a bad correction would otherwise never show that it is bad.
    """

    _correction: float = 1.0
    _learned_at: float = 0.0
    _expected: dict[str, _Expected] = field(default_factory=dict)
    _count: int = 0
    _predicted_seconds: float = 0.0
    _actual_seconds: float = 0.0
    _error_seconds: float = 0.0

    @property
    def awaits(self) -> bool:
        """Whether the first token of any request is to be compared with its prediction."""
        return bool(self._expected)

    def correction(self, now: float) -> float:
        """What to multiply a prediction by."""
        elapsed = max(0.0, now - self._learned_at)
        return 1.0 + (self._correction - 1.0) * 0.5 ** (elapsed / _HALF_LIFE)

    def is_stale(self, now: float) -> bool:
        """Whether nothing has been learned for so long that an idle engine should rather try than predict."""
        return now - self._learned_at > _STALE

    def expect(self, request_id: str, arrival: float, now: float, raw: float) -> None:
        """A request was taken for which `raw` seconds from now were predicted, uncorrected."""
        predicted = now - arrival + raw * self.correction(now)
        self._expected[request_id] = _Expected(arrival, now, raw, predicted)

    def first_token(self, request_id: str, now: float) -> None:
        """Its first token is there. No change if nothing was predicted."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        actual = now - expected.arrival
        self._count += 1
        self._predicted_seconds += expected.predicted
        self._actual_seconds += actual
        self._error_seconds += abs(actual - expected.predicted)
        if expected.raw > 0:
            low, high = _RANGE
            seen = min(max((now - expected.made_at) / expected.raw, low), high)
            known = self.correction(now)
            self._correction = known + _SHARE * (seen - known)
        self._learned_at = now

    def forget(self, request_id: str) -> None:
        """It will have no first token."""
        self._expected.pop(request_id, None)

    def fill_stats(self, stats: EngineStats, now: float) -> None:
        stats.ttft_predictions = self._count
        stats.ttft_predicted_seconds = self._predicted_seconds
        stats.ttft_actual_seconds = self._actual_seconds
        stats.ttft_error_seconds = self._error_seconds
        stats.ttft_correction = self.correction(now)
