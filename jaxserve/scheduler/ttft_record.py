"""Predicted times to first token against actual ones: what predictions are corrected by, and how good they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.stats import EngineStats

_SHARE = 0.1  # of the correction that the newest request decides
_SPREAD_SHARE = 0.05  # of the spread: slower, for it is to cover what is rare
_RANGE = (0.25, 4.0)
_TYPICAL_SPREAD = 0.25  # where nothing has been learned
_HALF_LIFE = 30.0  # seconds after which half of what was learned is forgotten, unless it is confirmed
_STALE = 60.0  # seconds after which an idle engine's knowledge counts as none


@dataclass(frozen=True, slots=True)
class _Expected:
    rank: int
    arrival: float
    made_at: float
    raw: float  # seconds from `made_at`, uncorrected
    predicted: float  # seconds from the arrival, corrected


@dataclass(frozen=True, slots=True)
class Trust:
    """How far to trust a prediction.

    Attributes:
      correction: what to multiply it by: the mean of actual over predicted times.
      spread: mean absolute deviation of that.
    """

    correction: float = 1.0
    spread: float = _TYPICAL_SPREAD


_UNKNOWN = Trust()


@dataclass(slots=True)
class TtftRecord:
    """Belongs to one scheduler. All times are seconds of the engine's clock.

    What is learned fades: requests refused because of a bad correction would otherwise never show that it is bad.
    """

    _learned: dict[int, tuple[Trust, float]] = field(default_factory=dict)  # by class: what, and when
    _expected: dict[str, _Expected] = field(default_factory=dict)
    _count: int = 0
    _predicted_seconds: float = 0.0
    _actual_seconds: float = 0.0
    _error_seconds: float = 0.0

    @property
    def awaits(self) -> bool:
        """Whether the first token of any request is to be compared with its prediction."""
        return bool(self._expected)

    def trust(self, rank: int, now: float) -> Trust:
        """In a prediction for a request of class `rank`: one class passes the other."""
        value, learned_at = self._learned.get(rank, (_UNKNOWN, now))
        kept = 0.5 ** (max(0.0, now - learned_at) / _HALF_LIFE)
        return Trust(
            _UNKNOWN.correction + (value.correction - _UNKNOWN.correction) * kept,
            _UNKNOWN.spread + (value.spread - _UNKNOWN.spread) * kept,
        )

    def is_stale(self, rank: int, now: float) -> bool:
        """Whether nothing has been learned for so long that an idle engine should rather try than predict."""
        return rank not in self._learned or now - self._learned[rank][1] > _STALE

    def expect(self, request_id: str, rank: int, arrival: float, now: float, raw: float) -> None:
        """A request was taken for which `raw` seconds from now were predicted, uncorrected."""
        predicted = now - arrival + raw * self.trust(rank, now).correction
        self._expected[request_id] = _Expected(rank, arrival, now, raw, predicted)

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
            known = self.trust(expected.rank, now)
            deviation = seen - known.correction
            learned = Trust(
                known.correction + _SHARE * deviation,
                known.spread + _SPREAD_SHARE * (abs(deviation) - known.spread),
            )
            self._learned[expected.rank] = learned, now

    def forget(self, request_id: str) -> None:
        """It will have no first token."""
        self._expected.pop(request_id, None)

    def fill_stats(self, stats: EngineStats, now: float) -> None:
        stats.ttft_predictions = self._count
        stats.ttft_predicted_seconds = self._predicted_seconds
        stats.ttft_actual_seconds = self._actual_seconds
        stats.ttft_error_seconds = self._error_seconds
        known = self.trust(0, now)
        stats.ttft_correction, stats.ttft_spread = known.correction, known.spread
