"""Block tables of running requests: match a prefix, fork a sibling, allocate, grow, free.

A request is given blocks for all its known tokens when it is admitted, so a prefill chunk can never find the pool
empty; afterwards it grows a block at a time while it decodes.

Where prefixes are not shared, the blocks of a preempted request are named by digests of its group's own, so that
it can find them again, on the device or in the host tier, and nobody else can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from jaxserve.request import Request
from jaxserve.scheduler.block_moves import BlockMoves
from jaxserve.scheduler.block_pool import BlockPool
from jaxserve.scheduler.host_swap import HostSwap
from jaxserve.scheduler.prefix_hash import block_digests, private_root_digest, root_digest


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request need not compute. A finding only: no reference is held until `KVCacheManager.admit`.

    Attributes:
      block_ids: full blocks to share, from the first on.
      host_digests: of the full blocks behind them, which are in the host tier.
      num_tokens: tokens covered by both, and by `copy_source`.
      is_fork: taken from a running sibling's table, not found in the prefix table.
      copy_source: a block of which the beginning is reused through a copy, because the request will write into it.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    host_digests: tuple[bytes, ...] = ()
    is_fork: bool = False
    copy_source: int | None = None


@dataclass(slots=True)
class _Table:
    block_ids: list[int]
    num_registered: int  # leading blocks whose digests were offered to the prefix table
    num_taken: int = 0  # leading blocks that plans have named


@dataclass(slots=True)
class _DigestChain:
    """Digests of a request's full blocks, computed as far as somebody asked. Outlives a preemption."""

    root: bytes
    digests: list[bytes] = field(default_factory=list)


class KVCacheManager:
    """
    Args:
      enable_prefix_caching: requests share the blocks of equal beginnings.
      swap: None keeps nothing in host memory.

    Attributes:
      pool: the device's blocks.
      swap: what moves between them and host memory, and other moves of the plan that is being made.
      shares_prefixes: `enable_prefix_caching`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, swap: HostSwap | None = None
    ) -> None:
        self.swap = swap or HostSwap.off()
        self.shares_prefixes = enable_prefix_caching
        self.pool = BlockPool(
            num_blocks,
            block_size,
            enable_prefix_caching or self.swap.is_on,
            self.swap.evicted if self.swap.is_on else None,
        )
        self.block_size = block_size
        self._tables: dict[str, _Table] = {}
        self._chains: dict[str, _DigestChain] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_reusable(self, request: Request, *, limit: int, source: Request | None = None) -> Reuse:
        """The longest part of `request` that is in the cache.

        Args:
          limit: most tokens to reuse. At least one token is always left to compute.
          source: a running request with the same prompt, all of it computed, to fork from.
        """
        limit = min(limit, request.num_tokens - 1)
        shared, in_host = self._match_prefix(request, limit)
        num_shared = (len(shared) + len(in_host)) * self.block_size
        if source is not None:
            num_forked = request.num_prompt_tokens - 1
            if num_shared < num_forked <= limit:
                table = self._tables[source.request_id].block_ids
                full, partial = divmod(num_forked, self.block_size)
                copy_source = table[full] if partial else None
                return Reuse(tuple(table[:full]), num_forked, is_fork=True, copy_source=copy_source)
        return Reuse(tuple(shared), num_shared, tuple(in_host))

    def _match_prefix(self, request: Request, limit: int) -> tuple[list[int], list[bytes]]:
        """Blocks on the device as far as there are, then digests of blocks in the host tier as far as there are."""
        shared: list[int] = []
        in_host: list[bytes] = []
        if not (self.shares_prefixes or self.swap.keeps(request.request_id)):
            return shared, in_host
        count = limit // self.block_size
        for index in range(count):
            # One whose first block is unknown, as most, may be refused: the others' digests are not needed yet.
            block_id = self.pool.lookup(self._digests(request, count if index else 1)[index])
            if block_id is None:
                break
            shared.append(block_id)
        if self.swap.is_on:
            for index in range(len(shared), count):
                digest = self._digests(request, count)[index]
                if self.swap.tier.lookup(digest) is None:
                    break
                in_host.append(digest)
        return shared, in_host

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """Of the first `count` blocks, or of more if they are known."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            salt = request.cache_salt
            root = root_digest(salt) if self.shares_prefixes else private_root_digest(salt, request.group_id)
            chain = self._chains[request.request_id] = _DigestChain(root)
        digests, size = chain.digests, self.block_size
        if len(digests) < count:
            token_ids = request.token_ids(len(digests) * size, count * size)
            digests += block_digests(digests[-1] if digests else chain.root, token_ids, size)
        return digests

    def num_blocks_of(self, request_id: str) -> int:
        """Blocks in a request's table, those included that others hold as well."""
        return len(self._tables[request_id].block_ids)

    def num_missing(self, reuse: Reuse, num_tokens: int) -> int:
        """Blocks that must become free before a table for `num_tokens` tokens can be made; none if <= 0."""
        needed = self.blocks_for(num_tokens) - len(reuse.block_ids)
        idle_hits = sum(1 for block_id in reuse.block_ids if self.pool.ref_count(block_id) == 0)
        return needed - (self.pool.num_free - idle_hits)

    def admit(self, request: Request, reuse: Reuse, num_tokens: int) -> int:
        """Make a block table for `num_tokens` tokens; what must be copied or brought in for it goes to `swap.moves`.

        Returns the tokens that need not be computed: those of `reuse`, or a few less.

        Raises:
          ValueError: not enough blocks are free; nothing changes then.
        """
        assert request.request_id not in self._tables, f"{request.request_id} already has a block table"
        missing = self.num_missing(reuse, num_tokens)
        if missing > 0:
            raise ValueError(f"{missing} KV blocks short for {request.request_id}")
        # Hits are referenced before anything is allocated: an allocation evicts free blocks, and hits may be free;
        # what it evicts may go to the host tier, and take the place of a block there.
        self.pool.touch(reuse.block_ids)
        hosts = [self.swap.tier.read(digest) for digest in reuse.host_digests]
        shared, moves = len(reuse.block_ids), self.swap.moves
        own = self._allocate(self.blocks_for(num_tokens) - shared)
        num_in = moves.num_safe(own[: len(hosts)])
        for host, block_id, digest in zip(hosts[:num_in], own, reuse.host_digests, strict=False):
            moves.ins[block_id] = host
            self.pool.register(digest, block_id)
        self.swap.count_admission(num_in)
        self.swap.let_go(request.request_id)
        if reuse.copy_source is not None:
            moves.copies[own[0]] = reuse.copy_source
        self._tables[request.request_id] = _Table([*reuse.block_ids, *own], shared + num_in)
        return reuse.num_tokens - (len(hosts) - num_in) * self.block_size

    def _allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        self.swap.moves.handed_out(block_ids)
        return block_ids

    def take_moves(self) -> BlockMoves:
        """What must move before the step that is being planned. To be called when there will be such a step."""
        return self.swap.end_plan()

    def room_of(self, request_id: str) -> int:
        """Tokens that a request's table has room for."""
        return len(self._tables[request_id].block_ids) * self.block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Lengthen a table to hold `num_tokens` tokens. False, and no change, when too few blocks are free."""
        table = self._tables[request_id].block_ids
        extra = self.blocks_for(num_tokens) - len(table)
        if extra > self.pool.num_free:
            return False
        if extra > 0:
            table.extend(self._allocate(extra))
        return True

    def grow_towards(self, request_id: str, num_tokens: int, *, spare: int) -> int:
        """Lengthen a table towards `num_tokens` tokens, as far as more than `spare` blocks stay free.

        Returns the tokens that it holds then.
        """
        table = self._tables[request_id].block_ids
        extra = min(self.blocks_for(num_tokens) - len(table), self.pool.num_free - spare)
        if extra > 0:
            table.extend(self._allocate(extra))
        return len(table) * self.block_size

    def take_new_block_ids(self, request_id: str) -> tuple[int, ...]:
        """What the table has gained since the last call; all of it the first time."""
        table = self._tables[request_id]
        block_ids, taken = table.block_ids, table.num_taken
        if taken == len(block_ids):
            return ()
        table.num_taken = len(block_ids)
        return tuple(block_ids[taken:])

    def commit(self, requests: Iterable[Request]) -> None:
        """Offer every full block of theirs that is computed by now to the prefix table."""
        if not self.shares_prefixes:
            return
        for request in requests:
            table = self._tables[request.request_id]
            full = request.num_computed_tokens // self.block_size
            if table.num_registered < full:
                digests = self._digests(request, full)
                for index in range(table.num_registered, full):
                    self.pool.register(digests[index], table.block_ids[index])
                table.num_registered = full

    def free(self, request_id: str) -> None:
        """Drop the table and its references."""
        self.pool.free(self._tables.pop(request_id).block_ids)

    def keep(self, request: Request) -> None:
        """Pin what a running request has computed, as it is about to be preempted, if that is worth it.

        A last, partly filled block is not kept.
        """
        if not self.swap.is_on:
            return
        full = request.num_computed_tokens // self.block_size
        digests = self._digests(request, full)[:full]
        if not self.swap.keep(request.request_id, digests):
            return
        if not self.shares_prefixes:  # else they have been offered to the prefix table as they became full
            table = self._tables[request.request_id].block_ids
            for digest, block_id in zip(digests, table, strict=False):
                self.pool.register(digest, block_id)

    def clear(self) -> None:
        """Forget what any block contains, as nobody holds one any more and the device has lost its state."""
        assert not self._tables, f"tables of {sorted(self._tables)}"
        self.pool.clear_prefixes()
        self.swap.clear()

    def forget(self, request_id: str) -> None:
        """Drop what is remembered about a request that has ended."""
        self.swap.let_go(request_id)
        chain = self._chains.pop(request_id, None)
        if chain is None or self.shares_prefixes:
            return
        for digest in chain.digests:
            if not self.swap.tier.is_pinned(digest):  # by a sibling
                self.swap.tier.discard(digest)
                block_id = self.pool.lookup(digest)
                if block_id is not None:
                    self.pool.unregister(block_id)

    def distrust(self, request_id: str) -> None:
        """Take every block of a failed request out of the prefix table: any of them may hold non-finite entries.

        What host memory has of the same contents goes as well.
        """
        for block_id in self._tables[request_id].block_ids:
            self.pool.unregister(block_id)
        if self.swap.is_on and request_id in self._chains:
            self.swap.discard(self._chains[request_id].digests)

    def victims_for(
        self, candidates: Iterable[Request], missing: int, keep: Collection[int]
    ) -> list[Request] | None:
        """The first candidates whose blocks, freed together, give `missing` free ones; None if all are not enough.

        At least one is named. Blocks in `keep` do not count, nor do blocks that others hold as well.
        """
        held: dict[int, int] = {}
        gained = 0
        victims = []
        for candidate in candidates:
            victims.append(candidate)
            for block_id in self._tables[candidate.request_id].block_ids:
                held[block_id] = held.get(block_id, 0) + 1
                if held[block_id] == self.pool.ref_count(block_id) and block_id not in keep:
                    gained += 1
            if gained >= missing:
                return victims
        return None

    def check_integrity(self, running: Collection[Request]) -> None:
        """Raises AssertionError naming what is inconsistent between the pool and the tables of `running`."""
        self.pool.check_integrity()
        assert set(self._tables) == {request.request_id for request in running}, (
            f"tables of {sorted(self._tables)}, running {sorted(r.request_id for r in running)}"
        )
        held = [0] * (self.pool.num_blocks + 1)
        for request in running:
            table = self._tables[request.request_id].block_ids
            assert len(set(table)) == len(table), (
                f"{request.request_id} has a block twice in its table: {table}"
            )
            assert len(table) >= self.blocks_for(request.num_planned_tokens), (
                f"{request.request_id} has {len(table)} blocks for {request.num_planned_tokens} planned tokens"
            )
            for block_id in table:
                held[block_id] += 1
        for block_id, count in enumerate(held):
            assert count == self.pool.ref_count(block_id), (
                f"block {block_id} is in {count} tables and has {self.pool.ref_count(block_id)} references"
            )
        self.swap.check_integrity(self._chains.keys() - self._tables.keys())
        used = sum(1 for count in held if count)
        assert used + self.pool.num_free == self.pool.num_blocks, (
            f"{used} used and {self.pool.num_free} free of {self.pool.num_blocks} blocks"
        )
        for request in running:
            self._check_table(request)

    def _check_table(self, request: Request) -> None:
        table = self._tables[request.request_id].block_ids
        full = request.num_computed_tokens // self.block_size
        for index, block_id in enumerate(table):
            digest = self.pool.digest(block_id)
            if index < full:
                assert digest is None or digest == self._digests(request, full)[index], (
                    f"block {block_id} of {request.request_id} is in the prefix table for other tokens"
                )
            else:
                assert digest is None, f"{request.request_id} will write into cached block {block_id}"
                assert self.pool.ref_count(block_id) == 1, (
                    f"{request.request_id} will write into shared block {block_id}"
                )
