"""How long drafting on the device takes, learned from what was drafted."""

from __future__ import annotations

from dataclasses import dataclass, field

_SHARE = 0.2  # of what is known that the newest call decides
_PROBE_EVERY = (
    64  # plans without a draft; then one token is drafted, as acceptance and times may have changed
)


@dataclass(slots=True)
class DraftTimes:
    """Seconds a round (one token for each row), by rows rounded up to a power of two. Belongs to one thread."""

    _rounds: dict[int, float] = field(default_factory=dict)
    _idle_plans: int = 0

    def observe(self, num_rows: int, num_rounds: int, seconds: float) -> None:
        """Learn from a call that took `seconds`."""
        size, each = _rounded(num_rows), seconds / num_rounds
        known = self._rounds.get(size)
        self._rounds[size] = each if known is None else known + _SHARE * (each - known)
        self._idle_plans = 0

    def seconds(self, num_rows: int, num_rounds: int) -> float | None:
        """What drafting so many tokens for each row will take; None: nothing of that size was drafted yet."""
        known = self._rounds.get(_rounded(num_rows))
        return None if known is None else known * num_rounds

    def is_time_to_probe(self) -> bool:
        """Whether to draft a token although it does not pay, now that another plan goes without; see _PROBE_EVERY."""
        self._idle_plans += 1
        return self._idle_plans > _PROBE_EVERY


def _rounded(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()
