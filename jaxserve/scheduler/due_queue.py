"""Who waits for a moment, in the order of these moments."""

from __future__ import annotations

import heapq
from collections.abc import Collection

_SLACK = 64  # entries of those who have left that may be kept beside as many as wait


class DueQueue:
    """Request ids by when they are due. All methods are O(log n), amortised."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []  # those who have left, too
        self._count = 0

    @property
    def waiting(self) -> Collection[str]:
        return self._due.keys()

    def push(self, request_id: str, due: float) -> None:
        """It is due then, whatever was said before."""
        self._due[request_id] = due
        heapq.heappush(self._heap, (due, self._count, request_id))
        self._count += 1

    def leave(self, request_id: str) -> None:
        """It waits no longer. No change if it did not."""
        if self._due.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._due) + _SLACK:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def pop(self, now: float) -> str | None:
        """Who has been due longest, and waits no longer by that; None when nobody is."""
        while self._heap and self._heap[0][0] <= now:
            due, _, request_id = heapq.heappop(self._heap)
            if self._due.get(request_id) == due:
                del self._due[request_id]
                return request_id
        return None
