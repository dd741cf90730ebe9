"""Who goes first, and how a step's token budget is divided. Pure decisions; they allocate nothing.

One long prompt at a time advances, in a lane of its own: it is never starved by short ones, and takes at most half
of what decoding leaves while short ones want to prefill as well, so it never delays them much either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.request import Request, ServiceClass
from jaxserve.scheduler.waiting_queue import Key

# (class, priority, tag): smaller goes first, then who came first. Class is 0, or 1 for what gives way and ages.
# Requests of a smaller (class, priority) take the places of running ones of a larger; tags only order.
Order = tuple[int, int, float]

CLASS_RANKS = {ServiceClass.INTERACTIVE: 0, ServiceClass.BACKGROUND: 1}
BACKGROUND = CLASS_RANKS[ServiceClass.BACKGROUND]


class Policy(Protocol):
    """What the continuous scheduler asks, and what a class named by `EngineConfig.policy` has to offer.

    It is made with the `ResolvedConfig` as its only argument, and called by one thread at a time. Inheriting from
    `ChunkedPrefillPolicy` or `FairPolicy` and overriding `order` is enough for most.

    `order(request, cost)` followed by `ended(request, order, cost)` must leave everything as it was: a request that is
    refused goes through both, and so does one that is only asked about (`BaseScheduler.check`), at times that no
    recording knows of. A policy that keeps something of them decides otherwise in a replay.
    """

    @property
    def max_prefill_chunk(self) -> int:
        """Tokens, at least 1: what `is_long` and `lane_share` go by."""
        ...

    def order(self, request: Request, cost: float) -> Order:
        """The place of a request that arrives; it keeps it. `cost`: tokens that it is expected to compute in all."""
        ...

    def admitted(self, request: Request, order: Order, cost: float) -> None:
        """It starts for the first time. `order`, `cost`: as they were in `order()`."""
        ...

    def ended(self, request: Request, order: Order, unused: float) -> None:
        """It ends, started or not; `unused` of its cost it did not compute (negative: it computed more)."""
        ...

    def is_long(self, num_uncomputed_tokens: int) -> bool:
        """Whether a prompt belongs to the lane for long ones."""
        ...

    def lane_share(self, budget: int) -> int:
        """Tokens that belong to the long prompt first, of what decoding left."""
        ...

    def divide(self, uncomputed: Sequence[int], budget: int) -> list[int]:
        """Tokens granted to each prefilling request of a class, see `ChunkedPrefillPolicy.divide`."""
        ...


class ChunkedPrefillPolicy:
    """First come, first served within a class and priority; long prompts in chunks.

    Attributes:
      max_prefill_chunk: a request with more uncomputed tokens than this is long, and while others want to prefill
        it advances by at most that many a step.
    """

    def __init__(self, max_prefill_chunk: int) -> None:
        self.max_prefill_chunk = max_prefill_chunk

    def order(self, request: Request, cost: float) -> Order:
        """Interactive before background, then lower priority numbers, then arrival."""
        return CLASS_RANKS[request.service_class], request.priority, 0.0

    def admitted(self, request: Request, order: Order, cost: float) -> None: ...

    def ended(self, request: Request, order: Order, unused: float) -> None: ...

    def is_long(self, num_uncomputed_tokens: int) -> bool:
        return num_uncomputed_tokens > self.max_prefill_chunk

    def lane_share(self, budget: int) -> int:
        """Tokens that belong to the long prompt first, of what decoding left."""
        return min(self.max_prefill_chunk, -(-budget // 2))

    def divide(self, uncomputed: Sequence[int], budget: int) -> list[int]:
        """Tokens granted to each prefilling request.

        Args:
          uncomputed: tokens that each has left, in order of their keys.
          budget: tokens of this step that decoding left.

        Returns:
          Grants in the same order, summing to min(budget, everything left). First its share for the first long
          one, then the short ones in order, then what is left for the long ones in order.
        """
        grants = [0] * len(uncomputed)
        longs = [index for index, count in enumerate(uncomputed) if self.is_long(count)]
        left = budget
        if longs:
            grants[longs[0]] = self.lane_share(budget)
            left -= grants[longs[0]]
        for index, count in enumerate(uncomputed):
            if not self.is_long(count):
                grants[index] = min(count, left)
                left -= grants[index]
        for index in longs:
            extra = min(uncomputed[index] - grants[index], left)
            grants[index] += extra
            left -= extra
        return grants


class PrefillBudget:
    """How much of a step's budget is spoken for while requests of a class are being admitted.

    Mirrors `ChunkedPrefillPolicy.divide` closely enough that whoever is admitted gets tokens in the same step.
    """

    def __init__(self, policy: Policy, budget: int) -> None:
        self._policy = policy
        self._budget = budget
        self._short_tokens = 0
        self._long_tokens = 0
        self._lane_holder: Key | None = None

    def add(self, key: Key, num_uncomputed_tokens: int) -> None:
        """Count a running request that prefills."""
        if not self._policy.is_long(num_uncomputed_tokens):
            self._short_tokens += num_uncomputed_tokens
            return
        self._long_tokens += num_uncomputed_tokens
        if self._lane_holder is None or key < self._lane_holder:
            self._lane_holder = key

    def give_way(self, num_uncomputed_tokens: int) -> None:
        """Leave tokens to a request of a class that goes first."""
        self._budget = max(0, self._budget - num_uncomputed_tokens)

    def admits_short(self, *, long_waits: bool) -> bool:
        """Whether a short one would get a token; `long_waits`: keep room for a long one about to be admitted."""
        reserved = 0
        if self._lane_holder is not None:
            reserved = self._policy.lane_share(self._budget)
        elif long_waits:
            # Rounded down: a budget of one token goes to whoever is first in the queue, and no kind starves.
            reserved = min(self._policy.max_prefill_chunk, self._budget // 2)
        return self._budget - reserved - self._short_tokens > 0

    def admits_long(self, key: Key) -> bool:
        """Whether the lane is free, would pass to this one, or all others will be through with budget to spare."""
        if self._budget < 1:
            return False
        if self._lane_holder is None or key < self._lane_holder:
            return True
        return self._budget - self._short_tokens - self._long_tokens > 0
