"""Carries out a plan's swaps: KV blocks to host memory and back, in batches of a fixed size.

Blocks on their way out are gathered into an array of their own, behind all steps launched before, and copied from
there while the device goes on. They are waited for when the next result is read (by then they have long come), when
one of them is to come in again, and when too many are under way. Only so many batches ever exist, so the memory
that they take is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.device.host_pool import HostPool
from jaxserve.device.kv_cache import SWAP_BATCH, KVCache
from jaxserve.device.program_definitions import GATHER_BLOCKS, SCATTER_BLOCKS
from jaxserve.outputs import BlockTransfers
from jaxserve.scheduler.host_tier import HostSpace

_MOST_OUT = 2  # batches on their way to the host
_MOST_IN = 2  # ... and to the device
NUM_BUFFERS = (_MOST_OUT + _MOST_IN) * SWAP_BATCH  # blocks that all of them hold together

Pairs = Sequence[tuple[int, int]]


def host_tier_bytes(host: HostSpace, *, on_host: bool) -> int:
    """What all this takes of the device's memory; `on_host`: that is the host's."""
    if not host.num_blocks:
        return 0
    return (NUM_BUFFERS + (host.num_blocks if on_host else 0)) * host.block_bytes


class BlockSwap:
    """Belongs to the runner's thread.

    Args:
      program: gives `GATHER_BLOCKS` and `SCATTER_BLOCKS`, once something is swapped.
      block_bytes: of one block.
      clock: seconds; measures transfers.
    """

    def __init__(
        self,
        pool: HostPool,
        program: Callable[[str], Any],
        *,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self._program = program
        self._block_bytes = block_bytes
        self._clock = clock
        self._out: deque[tuple[list[int], Any]] = deque()  # host blocks, and the array they come from
        self._in: deque[Any] = deque()  # something that each scatter gives when it is done
        self._moved = BlockTransfers()

    def swap_out(self, cache: KVCache, pairs: Pairs) -> None:
        """Begin to copy (device, host) blocks, as the steps launched so far leave them."""
        started = self._clock()
        for batch in _batches(pairs):
            while len(self._out) >= _MOST_OUT:
                self._land()
            blocks = self._program(GATHER_BLOCKS)(cache, _padded([device for device, _ in batch]))
            blocks.copy_to_host_async()
            self._out.append(([host for _, host in batch], blocks))
        self._count_out(len(pairs), started)

    def swap_in(self, cache: KVCache, pairs: Pairs) -> KVCache:
        """Copy (host, device) blocks into the cache, which is donated. Steps launched later find them."""
        started = self._clock()
        for batch in _batches(pairs):
            hosts = [host for host, _ in batch]
            while any(not set(hosts).isdisjoint(coming) for coming, _ in self._out):
                self._land()
            while len(self._in) >= _MOST_IN:
                jax.block_until_ready(self._in.popleft())
            blocks = jax.device_put(self.pool.read(hosts, SWAP_BATCH))
            cache, done = self._program(SCATTER_BLOCKS)(
                cache, _padded([device for _, device in batch]), blocks
            )
            self._in.append(done)
        self._count_in(len(pairs), started)
        return cache

    def collect(self) -> None:
        """Take in all blocks that are on their way to the host."""
        started = self._clock()
        while self._out:
            self._land()
        self._count_out(0, started)

    def take_transfers(self) -> BlockTransfers:
        """What was moved since the last call."""
        moved, self._moved = self._moved, BlockTransfers()
        return moved

    def reset(self) -> None:
        """Forget what is under way, as the device has lost it."""
        self._out.clear()
        self._in.clear()

    def calibrate(self, cache: KVCache, num_blocks: int = SWAP_BATCH) -> KVCache:
        """Move the first blocks there and back on an idle device: the first to be told of by `take_transfers`.

        To be called before anything is in host memory.
        """
        count = min(num_blocks, self.pool.num_blocks, cache.k[0].shape[0])
        for _ in range(2):  # the first time costs what is only done once
            self._moved = BlockTransfers()
            jax.block_until_ready(cache)
            self.swap_out(cache, [(i, i) for i in range(count)])
            self.collect()
            cache = self.swap_in(cache, [(i, i) for i in range(count)])
            started = self._clock()
            jax.block_until_ready(cache)
            self._count_in(0, started)
        return cache

    def _land(self) -> None:
        """Wait for the oldest batch on its way to the host. In order, so that the last to come to a block stays."""
        hosts, blocks = self._out.popleft()
        self.pool.write(hosts, np.asarray(blocks))

    def _count_out(self, num_blocks: int, started: float) -> None:
        old, seconds = self._moved, self._clock() - started
        num_bytes = old.out_bytes + num_blocks * self._block_bytes
        self._moved = replace(old, out_bytes=num_bytes, out_seconds=old.out_seconds + seconds)

    def _count_in(self, num_blocks: int, started: float) -> None:
        old, seconds = self._moved, self._clock() - started
        num_bytes = old.in_bytes + num_blocks * self._block_bytes
        self._moved = replace(old, in_bytes=num_bytes, in_seconds=old.in_seconds + seconds)


def _batches(pairs: Pairs) -> Iterator[Pairs]:
    for start in range(0, len(pairs), SWAP_BATCH):
        yield pairs[start : start + SWAP_BATCH]


def _padded(block_ids: list[int]) -> np.ndarray:
    """int32 [SWAP_BATCH], the sink behind the blocks."""
    padded = np.zeros(SWAP_BATCH, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded
