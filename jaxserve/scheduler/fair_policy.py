"""The order that is used unless another policy is named: classes, priorities, and fairness between clients."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.request import Request
from jaxserve.scheduler.fairness import FairShares
from jaxserve.scheduler.policy import CLASS_RANKS, ChunkedPrefillPolicy, Order


class FairPolicy(ChunkedPrefillPolicy):
    """Interactive before background; in a class, lower priority numbers first; among equals, clients share tokens."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config.max_prefill_chunk)
        self._shares = FairShares()

    def weight(self, client: str) -> float:
        """A client of weight 2 gets twice the tokens of one of weight 1. A subclass may know better than this: 1."""
        return 1.0

    def order(self, request: Request, cost: float) -> Order:
        level = CLASS_RANKS[request.service_class], request.priority
        return *level, self._shares.arrive(level, request.client, cost / self.weight(request.client))

    def admitted(self, request: Request, order: Order, cost: float) -> None:
        self._shares.admitted(order[:2], order[2], cost / self.weight(request.client))

    def ended(self, request: Request, order: Order, unused: float) -> None:
        self._shares.ended(order[:2], request.client, unused / self.weight(request.client))
