"""Who was promised a first token in time is not passed any more by who comes later, once its time gets short.

Between requests of one class and priority the policy's order holds (fair shares) for the first half of a target; after
that the earliest deadline goes first. So what was predicted for a request still holds when others come that would pass
it. One whose deadline has passed keeps its place in the policy's order: it can't be helped, and others can.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.request import Request
from jaxserve.scheduler.due_queue import DueQueue

_FAIR_PART = 0.5  # of a target for which the policy's order holds
_BEFORE_ALL = -1e9  # added to a deadline; finer than a microsecond there, and policies' tags begin at 0 or so


class Promises:
    """Requests that wait for their first token and have a target for it. All methods are O(log n), amortised."""

    def __init__(self) -> None:
        self._due = DueQueue()
        self._deadlines: dict[str, float] = {}

    def waits(self, request: Request) -> None:
        """It is queued. No change without a target, or once it has a first token."""
        target = request.targets.ttft_seconds
        if target is not None and not request.num_output_tokens:
            self._deadlines[request.request_id] = request.arrival_time + target
            self._due.push(request.request_id, request.arrival_time + _FAIR_PART * target)

    def leaves(self, request_id: str) -> None:
        """It waits no longer, or its place is settled. No change if it did not."""
        self._due.leave(request_id)
        self._deadlines.pop(request_id, None)

    @property
    def waiting(self) -> Collection[str]:
        """Those who wait and have not been put forward."""
        return self._due.waiting

    def take_due(self, now: float) -> tuple[str, float] | None:
        """The next one to put forward, who is forgotten here by that, and its tag from now on; None: nobody's time."""
        while (request_id := self._due.pop(now)) is not None:
            deadline = self._deadlines.pop(request_id)
            if now < deadline:
                return request_id, _BEFORE_ALL + deadline
        return None
