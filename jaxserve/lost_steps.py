"""Which requests the device goes on failing at: one of them may be why."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.outputs import RequestUpdate
from jaxserve.request import Request


class LostSteps:
    """Counts, for each request, the failed steps that it has been through since it last got a token.

    Failures in a row alone would not tell: the steps that compute a prompt anew, up to the one that always fails, work.

    Args:
      most: as many a request may go through.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[str, int] = {}

    def failed(self, requests: Sequence[Request]) -> list[Request]:
        """A step failed while these ran. Returns those that have been through too many."""
        for request in requests:
            self._counts[request.request_id] = self._counts.get(request.request_id, 0) + 1
        return [request for request in requests if self._counts[request.request_id] >= self._most]

    def worked(self, updates: Sequence[RequestUpdate]) -> None:
        """A step worked, with these results."""
        if self._counts:
            for update in updates:
                if update.new_token_ids:
                    self._counts.pop(update.request.request_id, None)

    def ended(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
