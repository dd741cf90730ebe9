"""A priority queue from which anything can be taken out: a heap with lazy deletion."""

from __future__ import annotations

import heapq

Key = tuple[int, int, int]  # (priority, arrival_order, order of add()): smaller goes first; no two are equal


class WaitingQueue:
    """Request ids by key. `push`, `pop` and `remove` are O(log n), amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, str]] = []
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def push(self, key: Key, request_id: str) -> None:
        assert request_id not in self._keys, f"{request_id} is queued already"
        self._keys[request_id] = key
        heapq.heappush(self._heap, (key, request_id))

    def peek(self) -> tuple[Key, str] | None:
        """The first entry, left in the queue; None when empty."""
        while self._heap:
            key, request_id = self._heap[0]
            if self._keys.get(request_id) == key:
                return key, request_id
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: str) -> None:
        """Take out an entry that is queued (KeyError otherwise)."""
        del self._keys[request_id]
        if self._heap[0][1] == request_id:
            heapq.heappop(self._heap)
        elif len(self._heap) > 64 and len(self._heap) > 2 * len(self._keys):
            # Only mass aborts get here: rebuild before the dead outnumber the living.
            self._heap = [(key, request_id) for request_id, key in self._keys.items()]
            heapq.heapify(self._heap)
