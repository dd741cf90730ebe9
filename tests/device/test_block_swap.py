"""Blocks on their way to host memory and back, next to a model in numpy that moves them at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ModelConfig
from jaxserve.device import kv_cache
from jaxserve.device.block_swap import BlockSwap
from jaxserve.device.host_pool import HostPool
from jaxserve.device.kv_cache import SWAP_BATCH, KVCache, copy_blocks
from jaxserve.device.program_definitions import GATHER_BLOCKS, SCATTER_BLOCKS
from jaxserve.outputs import BlockTransfers

MODEL = ModelConfig("LlamaForCausalLM", 64, 32, 64, 2, 4, 2, 8, 128)
BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 30, 25, 4
PROGRAMS = {
    GATHER_BLOCKS: jax.jit(kv_cache.gather_blocks),
    SCATTER_BLOCKS: jax.jit(kv_cache.scatter_blocks, donate_argnums=0),
}
donated_copy = jax.jit(copy_blocks, donate_argnums=0)
EACH = kv_cache.block_bytes(MODEL, BLOCK_SIZE, jnp.float32)


def make(
    dtype: Any = jnp.float32, clock: Callable[[], float] = itertools.count().__next__
) -> tuple[BlockSwap, KVCache]:
    """With every block's number in all of its entries, plus the layer's."""
    pool = HostPool(HOST_BLOCKS, kv_cache.block_bytes(MODEL, BLOCK_SIZE, dtype), np.dtype(dtype))
    swap = BlockSwap(pool, PROGRAMS.__getitem__, block_bytes=EACH, clock=clock)
    shape = (BLOCKS + 1, MODEL.num_kv_heads, BLOCK_SIZE, MODEL.head_dim)
    numbers = np.broadcast_to(np.arange(BLOCKS + 1)[:, None, None, None], shape)
    arrays = [jnp.asarray(numbers * 4 + i, dtype) for i in range(4)]
    return swap, KVCache(tuple(arrays[:2]), tuple(arrays[2:]))


def contents(cache: KVCache) -> np.ndarray:
    """Which block each usable block holds. Raises if entries, layers, or keys and values disagree."""
    found = []
    for index, pool in enumerate((*cache.k, *cache.v)):
        entries = np.asarray(pool, np.float32).reshape(BLOCKS + 1, -1)[1:]
        assert (entries == entries[:, :1]).all(), "a block is mixed"
        found.append((entries[:, 0] - index) / 4)
    assert all((x == found[0]).all() for x in found), "layers disagree"
    return found[0].astype(int)


def pairs(sources: int, destinations: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """No destination twice; blocks of the device count from 1 (see `plans`)."""
    one = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    return st.lists(one, max_size=min(destinations, 3 * SWAP_BATCH), unique_by=lambda pair: pair[1])


plans = st.tuples(
    pairs(BLOCKS, HOST_BLOCKS), pairs(HOST_BLOCKS, BLOCKS), pairs(BLOCKS, BLOCKS), st.booleans()
)


@settings(max_examples=60)
@given(st.lists(plans, max_size=6))
def test_it_is_as_if_all_moved_at_once(
    steps: list[tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]], bool]],
) -> None:
    """Out and in of the same host block in one plan, over several plans without a pause, and blocks overwritten
    right behind a swap-out."""
    swap, cache = make()
    host = dict[int, int]()
    device = dict(enumerate(range(1, BLOCKS + 1)))
    for out, back, copies, collects in steps:
        host |= {h: device[d] for d, h in out}
        back = [(h, d) for h, d in back if h in host]
        swap.swap_out(cache, [(d + 1, h) for d, h in out])
        cache = swap.swap_in(cache, [(h, d + 1) for h, d in back])
        device |= {d: host[h] for h, d in back}
        written = [(s, d) for s, d in copies if d not in {x for x, _ in copies}][: kv_cache.COPY_BATCH]
        batch = np.zeros((kv_cache.COPY_BATCH, 2), np.int32)
        batch[: len(written)] = np.reshape(written, (-1, 2)) + 1
        cache = donated_copy(cache, batch)  # as a step would write
        device |= {d: device[s] for s, d in written}
        if collects:
            swap.collect()
    assert contents(cache).tolist() == [device[d] for d in range(BLOCKS)]
    swap.collect()
    blocks = swap.pool.read(sorted(host), len(host))
    assert (blocks[:, 0] / 4).astype(int).tolist() == [host[h] for h in sorted(host)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_come_back(dtype: Any) -> None:
    """Also those of NaN, infinities and negative zero."""
    swap, cache = make(dtype)
    strange = jnp.asarray([float("nan"), float("-inf"), -0.0, 1e-40, 3.14159], dtype)
    keys = cache.k[0].at[3, 0, 0, :5].set(strange)
    cache = KVCache((keys, *cache.k[1:]), cache.v)
    before = [np.asarray(x[3]).tobytes() for x in jax.tree.leaves(cache)]
    swap.swap_out(cache, [(3, 7)])
    cache = swap.swap_in(cache, [(7, 9)])
    assert [np.asarray(x[9]).tobytes() for x in jax.tree.leaves(cache)] == before
    assert [np.asarray(x[3]).tobytes() for x in jax.tree.leaves(cache)] == before


def test_batches_that_nobody_waits_for_are_few() -> None:
    """So that their memory is known."""
    swap, cache = make()
    most = 0
    real = PROGRAMS[GATHER_BLOCKS]

    def gather(*arguments: Any) -> Any:
        nonlocal most
        most = max(most, len(swap._out) + 1)
        return real(*arguments)

    swap._program = {**PROGRAMS, GATHER_BLOCKS: gather}.__getitem__
    swap.swap_out(cache, [(1 + i, i) for i in range(25)])
    swap.swap_out(cache, [(1 + i, i) for i in range(25)])
    assert most == 2
    for _ in range(3):
        cache = swap.swap_in(cache, [(i, 1 + i) for i in range(25)])
        assert len(swap._in) <= 2
    assert contents(cache).tolist() == list(range(1, BLOCKS + 1))


def test_what_is_moved_is_measured_once() -> None:
    """A clock that goes on by a second at every look: each of out, collect, in takes one."""
    swap, cache = make()
    assert swap.take_transfers() == BlockTransfers()
    swap.swap_out(cache, [(1, 0), (2, 1)])
    cache = swap.swap_in(cache, [(0, 5)])
    swap.collect()
    assert swap.take_transfers() == BlockTransfers(2 * EACH, 2.0, EACH, 1.0)
    assert swap.take_transfers() == BlockTransfers()


def test_calibrating_measures_and_changes_nothing() -> None:
    swap, cache = make()
    cache = swap.calibrate(cache)
    moved = swap.take_transfers()
    assert moved.out_bytes == moved.in_bytes == SWAP_BATCH * EACH
    assert min(moved.out_seconds, moved.in_seconds) > 0
    assert contents(cache).tolist() == list(range(1, BLOCKS + 1))
