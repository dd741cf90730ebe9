"""Background requests that have waited long enough are promoted, one for every few interactive ones.

The second half of that keeps aged work from starving interactive work in its turn; both together bound the wait. The
k-th of the aged is promoted once it has waited for `max_wait` and 3 k interactive requests have been admitted since
the first one was due, and then it is the next to be admitted.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.scheduler.due_queue import DueQueue

INTERACTIVE_PER_PROMOTION = 3


class Ageing:
    """Who waits, by when he is due. `waits`, `leaves` and `take_due` are O(log n), amortised."""

    def __init__(self, max_wait: float) -> None:
        self._max_wait = max_wait
        self._due = DueQueue()
        self._credit = 0  # interactive admissions that the next promotion may use

    def waits(self, request_id: str, since: float, waited_before: float = 0.0) -> None:
        """A background request waits since then, after other waits of together `waited_before` seconds."""
        self._due.push(request_id, since + self._max_wait - waited_before)

    def leaves(self, request_id: str) -> None:
        """It waits no longer. No change if it did not."""
        self._due.leave(request_id)

    @property
    def waiting(self) -> Collection[str]:
        """Those who wait and have not been promoted."""
        return self._due.waiting

    def interactive_admitted(self) -> None:
        self._credit += 1

    def take_due(self, now: float) -> str | None:
        """The next one to promote now, who is forgotten here by that; None when it is nobody's time yet."""
        if self._credit < INTERACTIVE_PER_PROMOTION:
            return None
        request_id = self._due.pop(now)
        if request_id is None:
            self._credit = INTERACTIVE_PER_PROMOTION  # nothing is saved up while nobody is due
        else:
            self._credit -= INTERACTIVE_PER_PROMOTION
        return request_id
