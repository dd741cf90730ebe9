"""Background requests that have waited long enough are promoted, one for every few interactive ones.

The second half of that keeps aged work from starving interactive work in its turn; both together bound the wait. The
k-th of the aged is promoted once it has waited for `max_wait` and 3 k interactive requests have been admitted since
the first one was due, and then it is the next to be admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

INTERACTIVE_PER_PROMOTION = 3


class Ageing:
    """Who waits, by when he is due. `waits`, `leaves` and `take_due` are O(log n), amortised."""

    def __init__(self, max_wait: float) -> None:
        self._max_wait = max_wait
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._count = 0
        self._credit = 0  # interactive admissions that the next promotion may use

    def waits(self, request_id: str, since: float, waited_before: float = 0.0) -> None:
        """A background request waits since then, after other waits of together `waited_before` seconds."""
        due = since + self._max_wait - waited_before
        self._due[request_id] = due
        heapq.heappush(self._heap, (due, self._count, request_id))
        self._count += 1

    def leaves(self, request_id: str) -> None:
        """It waits no longer. No change if it did not."""
        if self._due.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    @property
    def waiting(self) -> Collection[str]:
        """Those who wait and have not been promoted."""
        return self._due.keys()

    def interactive_admitted(self) -> None:
        self._credit += 1

    def take_due(self, now: float) -> str | None:
        """The next one to promote now, who is forgotten here by that; None when it is nobody's time yet."""
        if self._credit < INTERACTIVE_PER_PROMOTION:
            return None
        while self._heap and self._heap[0][0] <= now:
            due, _, request_id = heapq.heappop(self._heap)
            if self._due.get(request_id) == due:
                del self._due[request_id]
                self._credit -= INTERACTIVE_PER_PROMOTION
                return request_id
        self._credit = INTERACTIVE_PER_PROMOTION  # nothing is saved up while nobody is due
        return None
