"""What moves between KV blocks before a step runs: collected while its plan is made, kept free of contradictions.

The order is: all swap-outs, all swap-ins, then copies (see `SchedulerOutput`). So a swap-out takes what steps before
have left in a block, whoever was given the block in this plan, and a block that comes in can be copied from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockMoves:
    """Each by its destination, so that there is one source for any.

    Attributes:
      outs: host block -> device block; ins: device block -> host block; copies: device block -> device block.
    """

    outs: dict[int, int] = field(default_factory=dict)
    ins: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)

    def handed_out(self, block_ids: Iterable[int]) -> None:
        """Blocks have a new holder: what was to come into them for one who has lost them again in the same plan."""
        if self.ins or self.copies:
            for block_id in block_ids:
                self.ins.pop(block_id, None)
                self.copies.pop(block_id, None)

    def take_out(self, device: int, host: int) -> None:
        """Only the last content that is to go to a host block does: nobody can read the others any more."""
        self.outs.pop(host, None)
        self.outs[host] = device

    def num_safe(self, destinations: list[int]) -> int:
        """How many, from the first on, may be swapped in to: not what a copy of this plan, running later, reads."""
        sources = set(self.copies.values())
        return next((i for i, block_id in enumerate(destinations) if block_id in sources), len(destinations))
