"""KV block ids: who holds them, which are free, and which prefix each full block contains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Hands out the block ids 1..num_blocks. Block 0 is the sink that padding writes to and is never handed out.

    A block whose last holder lets go becomes free, yet keeps its prefix digest, so that a later request with the
    same prefix can take it back; it loses the digest when it is handed to somebody else (an eviction).
    Free blocks without a digest are handed out first, then the least recently freed.

    Args:
      enable_prefix_caching: keep digests; else `register` does nothing.
      on_evict: told (block id, digest) of each eviction, before anybody writes into the block.

    Attributes:
      evictions: digests dropped because their block was handed out (only grows).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.evictions = 0
        self._on_evict = on_evict
        self._ref_counts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        # Next to be handed out first. An OrderedDict takes from both ends and from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those kept for the prefix cache included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find, held or free."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def digest(self, block_id: int) -> bytes | None:
        return self._digests[block_id]

    def snapshot(self) -> tuple[list[int], list[bytes | None]]:
        """Reference counts and digests of the blocks 1..num_blocks, in this order."""
        return self._ref_counts[1:], self._digests[1:]

    def free_ids(self) -> list[int]:
        """Free blocks, the next to be handed out first."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference.

        Raises:
          ValueError: fewer are free; nothing is taken then.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"asked for {count} KV blocks, {len(self._free)} are free")
        taken = []
        free, digests, ref_counts = self._free, self._digests, self._ref_counts
        for _ in range(count):
            block_id, _ = free.popitem(last=False)
            digest = digests[block_id]
            if digest is not None:
                del self._block_of[digest]
                digests[block_id] = None
                self.evictions += 1
                if self._on_evict is not None:
                    self._on_evict(block_id, digest)
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; free ones (prefix hits) are free no longer.

        Raises:
          ValueError: a block is neither held nor findable, so its content means nothing.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if self._digests[block_id] is None:
                    raise ValueError(f"KV block {block_id} is free and holds no known prefix")
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, given in table order.

        The tail is let go first, so that it is evicted first and a prefix survives longest.

        Raises:
          ValueError: a block is held by nobody (freed twice).
        """
        free, digests, ref_counts = self._free, self._digests, self._ref_counts
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] - 1
            if count < 0:
                raise ValueError(f"KV block {block_id} was freed twice")
            ref_counts[block_id] = count
            if count == 0:
                free[block_id] = None
                if digests[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def lookup(self, digest: bytes) -> int | None:
        """The block that holds this prefix, or None. Takes no reference."""
        return self._block_of.get(digest)

    def register(self, digest: bytes, block_id: int) -> bool:
        """Make a computed, held block findable. False, and no change, when another block has that content already.

        Raises:
          ValueError: the block is free, or is known under another digest.
        """
        if not self.enable_prefix_caching:
            return False
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"KV block {block_id} is free and can't enter the prefix table")
        known = self._digests[block_id]
        if known is not None and known != digest:
            raise ValueError(f"KV block {block_id} is in the prefix table under another digest")
        if digest in self._block_of:
            return self._block_of[digest] == block_id
        self._block_of[digest] = block_id
        self._digests[block_id] = digest
        return True

    def unregister(self, block_id: int) -> None:
        """Forget which prefix a block holds; no change for a block that holds none."""
        digest = self._digests[block_id]
        if digest is not None:
            del self._block_of[digest]
            self._digests[block_id] = None
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)

    def clear_prefixes(self) -> None:
        """Empty the prefix table."""
        for block_id in list(self._block_of.values()):
            self.unregister(block_id)

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is inconsistent. O(num_blocks), for tests and debugging."""
        free = set(self._free)
        assert self._ref_counts[0] == 0, "the sink block 0 is held"
        assert self._digests[0] is None, "the sink block 0 is in the prefix table"
        assert 0 not in free, "the sink block 0 is in the free list"
        for block_id in range(1, self.num_blocks + 1):
            count = self._ref_counts[block_id]
            assert count >= 0, f"block {block_id} has {count} references"
            assert (count == 0) == (block_id in free), (
                f"block {block_id} has {count} references and is {'' if block_id in free else 'not '}in the free list"
            )
            digest = self._digests[block_id]
            if digest is not None:
                assert self._block_of.get(digest) == block_id, (
                    f"prefix table does not lead to block {block_id}"
                )
        for digest, block_id in self._block_of.items():
            assert self._digests[block_id] == digest, (
                f"prefix table leads to block {block_id} of another digest"
            )
