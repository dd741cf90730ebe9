"""Which KV blocks go to host memory, and come back: for preempted requests, and for the prefix cache.

A block leaves the device only when it is handed to somebody else. Those of a preempted request are pinned in the host
tier until it runs again; so far as nobody takes them meanwhile, they are found on the device, and nothing has moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.scheduler.block_moves import BlockMoves
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.step_time import StepTimeModel
from jaxserve.scheduler.swap_cost import SwapCost
from jaxserve.stats import SwapStats


class HostSwap:
    """
    Args:
      keeps_evicted: cached blocks that nobody is waiting for are kept as well (the host tier of the prefix cache).

    Attributes:
      moves: of the plan that is being made.
    """

    def __init__(self, tier: HostTier, cost: SwapCost, *, keeps_evicted: bool) -> None:
        self.tier = tier
        self.cost = cost
        self.moves = BlockMoves()
        self._stats = SwapStats(blocks=tier.num_blocks, block_bytes=cost.block_bytes)
        self._keeps_evicted = keeps_evicted
        self._worth_keeping: bool | None = None  # for the plan that is being made
        self._pins: dict[str, list[bytes]] = {}

    @classmethod
    def off(cls) -> HostSwap:
        """Nothing is ever kept in host memory."""
        cost = SwapCost(0, 1, 1, StepTimeModel(lambda tokens, seqs: (tokens, seqs)))
        return cls(HostTier(0), cost, keeps_evicted=False)

    @property
    def is_on(self) -> bool:
        return self.tier.num_blocks > 0

    def end_plan(self) -> BlockMoves:
        """The moves collected: they are in a plan that will run, so later ones run behind them."""
        moves, self.moves = self.moves, BlockMoves()
        self._stats.out_blocks += len(moves.outs)
        self._stats.in_blocks += len(moves.ins)
        self.tier.end_reads()
        self._worth_keeping = None
        return moves

    def evicted(self, block_id: int, digest: bytes) -> None:
        """A cached block is about to be handed to somebody: last chance to keep its content."""
        if block_id in self.moves.ins:  # still to come, from the tier, which has it
            return
        if not self.tier.is_pinned(digest) and not self._is_worth_keeping():
            return
        host = self.tier.take(digest)
        if host is not None:
            self.moves.take_out(block_id, host)

    def _is_worth_keeping(self) -> bool:
        if self._worth_keeping is None:
            self._worth_keeping = self._keeps_evicted and self.cost.moving_is_cheaper(
                1, 1, self.cost.block_size
            )
        return self._worth_keeping

    def keep(self, request_id: str, digests: Sequence[bytes]) -> bool:
        """Pin the blocks of a request that is preempted, from the first on, if that is cheaper than computing.

        False where nothing is pinned: the request computes again whatever has not survived by chance.
        """
        assert request_id not in self._pins, f"{request_id} has pins already"
        pinned = self.tier.pin(digests)
        if not pinned:
            return False
        num_out = sum(1 for digest in pinned if self.tier.lookup(digest) is None)
        if not self.cost.moving_is_cheaper(num_out, len(pinned), len(pinned) * self.cost.block_size):
            self.tier.unpin(pinned)
            return False
        self._pins[request_id] = pinned
        self._stats.preemptions += 1
        return True

    def keeps(self, request_id: str) -> bool:
        """Whether anything is pinned for a request."""
        return request_id in self._pins

    def let_go(self, request_id: str) -> None:
        """Unpin the blocks of a request that runs again, or has ended."""
        self.tier.unpin(self._pins.pop(request_id, ()))

    def count_admission(self, num_blocks: int) -> None:
        """So many blocks are brought in for a request that starts."""
        self._stats.requests_in += num_blocks > 0

    def count_hits(self, num_tokens: int) -> None:
        """So many tokens of a prompt were found."""
        self._stats.hits += num_tokens

    def discard(self, digests: Iterable[bytes]) -> None:
        """Forget blocks, pinned or not."""
        for digest in digests:
            self.tier.discard(digest)

    def clear(self) -> None:
        """Forget every content, and what was to move: steps that should have brought it here may have failed."""
        self.moves = BlockMoves()
        self.tier.end_reads()
        self.tier.clear()

    def current_stats(self) -> SwapStats:
        """All that is counted here, with gauges as they are now."""
        stats, tier, cost = self._stats, self.tier, self.cost
        stats.used_blocks, stats.pinned_blocks, stats.evictions = (
            tier.num_used,
            tier.num_pinned,
            tier.evictions,
        )
        stats.out_bytes_per_second, stats.in_bytes_per_second = cost.out_rate, cost.in_rate
        return stats

    def check_integrity(self, waiting_ids: set[str]) -> None:
        """Raises AssertionError naming what is inconsistent."""
        self.tier.check_integrity()
        assert set(self._pins) <= waiting_ids, f"pins of {set(self._pins) - waiting_ids}, who do not wait"
        pins: dict[bytes, int] = {}
        for digests in self._pins.values():
            for digest in digests:
                pins[digest] = pins.get(digest, 0) + 1
        assert pins == self.tier._pins, "pins in the host tier that nobody has"
