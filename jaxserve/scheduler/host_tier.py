"""Which KV blocks lie in host memory: a bounded pool of host block ids, keyed by prefix digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSpace:
    """Host memory for KV blocks.

    Attributes:
      num_blocks: that fit; 0: there is no host tier.
      block_bytes: of one block in all layers, keys and values.
    """

    num_blocks: int = 0
    block_bytes: int = 0


class HostTier:
    """Keeps names of blocks only; their bytes move as plans say (`SchedulerOutput.swap_out`, `swap_in`).

    Where there is no room the least recently used block goes that is neither pinned nor about to be read. A digest can
    be pinned before it is here: then there will be room for it when it comes.

    Attributes:
      evictions: blocks that had to go for others (only grows).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # here and not kept; least recently used first
        self._pins: dict[bytes, int] = {}
        self._reads: dict[int, bytes] = {}  # host block -> its digest, of swap-ins that are being planned

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_pinned(self) -> int:
        """Blocks that somebody who waits will want back, here or still on the device."""
        return len(self._pins)

    def lookup(self, digest: bytes) -> int | None:
        """The host block with this content, or None."""
        return self._block_of.get(digest)

    def is_pinned(self, digest: bytes) -> bool:
        return digest in self._pins

    def free_ids(self) -> list[int]:
        """Blocks of which the content means nothing."""
        return list(self._free)

    def take(self, digest: bytes) -> int | None:
        """A host block to copy this content to. None where it is here already, or there is no room."""
        if digest in self._block_of:
            if digest in self._idle:
                self._idle.move_to_end(digest)
            return None
        if self._free:
            block_id = self._free.pop()
        elif self._idle:
            old, block_id = self._idle.popitem(last=False)
            del self._block_of[old]
            self.evictions += 1
        else:
            return None
        self._block_of[digest] = block_id
        self._settle(digest)
        return block_id

    def pin(self, digests: Iterable[bytes]) -> list[bytes]:
        """Keep, or keep room for, as many of the first digests as fit. Returns those, for `unpin`."""
        pinned = []
        for digest in digests:
            if digest not in self._pins and len(self._pins) >= self.num_blocks:
                break
            self._pins[digest] = self._pins.get(digest, 0) + 1
            self._settle(digest)
            pinned.append(digest)
        return pinned

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Drop a pin of each digest, the last first, so that a prefix is kept longest."""
        for digest in reversed(list(digests)):
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                self._settle(digest)

    def read(self, digest: bytes) -> int:
        """The host block of a digest that is here, kept as it is until `end_reads`."""
        block_id = self._block_of[digest]
        self._reads[block_id] = digest
        self._settle(digest)
        return block_id

    def end_reads(self) -> None:
        """All swap-ins planned so far are in plans that later ones run behind."""
        reads, self._reads = self._reads, {}
        for block_id, digest in reads.items():
            if self._block_of.get(digest) == block_id:
                self._settle(digest)
            else:  # discarded meanwhile
                self._free.append(block_id)

    def discard(self, digest: bytes) -> None:
        """Forget a block's content; no change if it is not here. Pins stay, as wishes."""
        block_id = self._block_of.pop(digest, None)
        if block_id is None:
            return
        self._idle.pop(digest, None)
        if block_id not in self._reads:
            self._free.append(block_id)

    def clear(self) -> None:
        """Forget every block's content, as when the device's state is lost. Nothing may be about to be read."""
        for digest in list(self._block_of):
            self.discard(digest)

    def _settle(self, digest: bytes) -> None:
        """Put a digest into, or take it out of, those that may be evicted."""
        block_id = self._block_of.get(digest)
        if block_id is None:
            return
        if digest in self._pins or block_id in self._reads:
            self._idle.pop(digest, None)
        elif digest not in self._idle:
            self._idle[digest] = block_id

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is inconsistent. O(num_blocks), for tests and debugging."""
        used = list(self._block_of.values())
        leaving = [
            block_id for block_id, digest in self._reads.items() if self._block_of.get(digest) != block_id
        ]
        assert sorted([*self._free, *used, *leaving]) == list(range(self.num_blocks)), (
            f"host blocks: free {sorted(self._free)}, used {sorted(used)}, leaving {leaving}"
        )
        assert len(self._pins) <= self.num_blocks, f"{len(self._pins)} pins on {self.num_blocks} host blocks"
        assert all(count > 0 for count in self._pins.values()), "a digest is pinned by nobody"
        reading = set(self._reads)
        for digest, block_id in self._block_of.items():
            kept = digest in self._pins or block_id in reading
            assert (digest in self._idle) != kept, (
                f"host block {block_id} is {'kept' if kept else 'not kept'} and "
                f"{'not ' if kept == (digest not in self._idle) else ''}to be evicted"
            )
            assert self._idle.get(digest, block_id) == block_id
        assert set(self._idle) <= set(self._block_of), "a block that is not here is to be evicted"
