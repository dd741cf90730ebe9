"""A circuit breaker: when the engine fails again and again, requests are refused at once, until one has gone well.

A state machine without threads, locks or a clock of its own. Closed: everything passes. Open: nothing does, for a
while. After that one request passes on trial (half-open); if it goes well everything passes again, if not the next
while is twice as long. Source of the pattern: M. Nygard, Release It!, "Circuit Breaker".
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """What happens to a request that comes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """What opens a breaker, and for how long.

    Attributes:
      failures_in_a_row: failed steps without one that worked in between.
      missed_share: of the promised first tokens in the last `window_seconds`, at least `min_promises`, came too late.
      open_seconds, max_open_seconds: the first while, and the longest that doubling leads to.
    """

    failures_in_a_row: int = 3
    missed_share: float = 0.8
    min_promises: int = 20
    window_seconds: float = 30.0
    open_seconds: float = 2.0
    max_open_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The right of one request to pass a breaker that is not closed.

    Attributes:
      opening: how often the breaker had opened by then; the verdict of an earlier trial says nothing.
    """

    opening: int


class BreakerOpenError(Exception):
    """Nothing passes for now.

    Attributes:
      retry_after_seconds: until the next trial may begin.
    """

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class CircuitBreaker:
    """
    Args:
      clock: seconds, never going back.

    Attributes:
      state: now.
      reason: what opened it last, one line; "" before.
      num_openings: how often it has opened.
    """

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.state = BreakerState.CLOSED
        self.reason = ""
        self.num_openings = 0
        self._clock = clock
        self._failures = 0
        self._next_trial = 0.0
        self._while_seconds = limits.open_seconds
        self._promises: deque[tuple[float, int, int]] = deque()  # (when, kept, missed)

    # Requests.

    def check(self) -> None:
        """Raises: BreakerOpenError: a request that came now would not pass."""
        if self.state is not BreakerState.CLOSED and (wait := self._next_trial - self._clock()) > 0:
            raise BreakerOpenError(self.reason, wait)

    def admit(self) -> Trial | None:
        """Let a request pass, on trial unless the breaker is closed. A trial that never ends does not block others:
        the next may begin a while later.

        Raises:
          BreakerOpenError: it does not pass.
        """
        self.check()
        if self.state is BreakerState.CLOSED:
            return None
        self.state = BreakerState.HALF_OPEN
        self._next_trial = self._clock() + self._while_seconds
        return Trial(self.num_openings)

    def judge(self, trial: Trial, succeeded: bool | None) -> None:
        """Say how a trial went; None: nothing was learned (its client left), so the next may begin at once."""
        if self.state is not BreakerState.HALF_OPEN or trial.opening != self.num_openings:
            return
        if succeeded is None:
            self.state = BreakerState.OPEN
            self._next_trial = self._clock()
        elif succeeded:
            self.state = BreakerState.CLOSED
            self._while_seconds = self.limits.open_seconds
            self._failures = 0
            self._promises.clear()
        else:
            self._open("a trial failed")

    # What the engine does.

    def step_failed(self) -> None:
        """A step failed."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open("a step failed during a trial")
        elif self.state is BreakerState.CLOSED and self._failures >= self.limits.failures_in_a_row:
            self._open(f"{self._failures} steps failed in a row")

    def step_worked(self) -> None:
        """A step worked."""
        self._failures = 0

    def first_tokens(self, kept: int, missed: int) -> None:
        """So many first tokens came within, and after, the time that their requests had been promised."""
        if self.state is not BreakerState.CLOSED or not kept + missed:
            return
        now, limits = self._clock(), self.limits
        self._promises.append((now, kept, missed))
        while self._promises[0][0] < now - limits.window_seconds:
            self._promises.popleft()
        all_missed = sum(entry[2] for entry in self._promises)
        count = all_missed + sum(entry[1] for entry in self._promises)
        if count >= limits.min_promises and all_missed >= limits.missed_share * count:
            self._open(f"{all_missed} of {count} requests had their first token too late")

    def _open(self, reason: str) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._while_seconds = min(2 * self._while_seconds, self.limits.max_open_seconds)
        self.state = BreakerState.OPEN
        self.reason = reason
        self.num_openings += 1
        self._next_trial = self._clock() + self._while_seconds
        self._promises.clear()
