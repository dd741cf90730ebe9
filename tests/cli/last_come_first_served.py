"""A policy that no server should have: whoever came last is first."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.request import Request
from jaxserve.scheduler.policy import ChunkedPrefillPolicy, Order


class LastComeFirstServed(ChunkedPrefillPolicy):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config.max_prefill_chunk)

    def order(self, request: Request, cost: float) -> Order:
        return 0, 0, -request.arrival_time
