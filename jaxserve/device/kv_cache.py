"""The paged KV cache: a pytree of preallocated arrays, and pure functions that write to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import ModelConfig

COPY_BATCH = 16  # block copies one call of `copy_blocks` makes
SWAP_BATCH = 8  # blocks that one call of `gather_blocks` or `scatter_blocks` moves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every block, one pair of arrays a layer. Block 0 is the sink that padding writes to.

    Attributes:
      k, v: L arrays [N, K, b, d]. A layer's own arrays, so that a step donates and updates each in place. The layers of
        a draft model, whose K and d are its own, come behind the target's.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    def layer(self, index: int) -> KVCache:
        """The cache of one layer."""
        return self.part(index, index + 1)

    def part(self, start: int, stop: int) -> KVCache:
        """The cache of some layers."""
        return KVCache(self.k[start:stop], self.v[start:stop])

    def with_part(self, start: int, part: KVCache) -> KVCache:
        """The same with `part` in the place of its layers from `start` on."""
        stop = start + len(part.k)
        return KVCache((*self.k[:start], *part.k, *self.k[stop:]), (*self.v[:start], *part.v, *self.v[stop:]))


def join_layers(caches: Sequence[KVCache]) -> KVCache:
    """The cache of several layers, from theirs."""
    return KVCache(
        tuple(pool for cache in caches for pool in cache.k),
        tuple(pool for cache in caches for pool in cache.v),
    )


def block_bytes(
    model: ModelConfig, block_size: int, dtype: jnp.dtype, draft: ModelConfig | None = None
) -> int:
    """Bytes one block takes in all layers, keys and values together.

    Args:
      draft: a draft model that keeps its own keys and values in the same blocks.
    """
    models = (model,) if draft is None else (model, draft)
    values = sum(2 * each.num_layers * each.num_kv_heads * each.head_dim for each in models)
    return values * jnp.dtype(dtype).itemsize * block_size


def allocate(
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: jnp.dtype,
    draft: ModelConfig | None = None,
) -> KVCache:
    """A cache of `num_blocks` usable blocks plus the sink, all zeros (unused slots must be finite for some kernels).

    Args:
      draft: see `block_bytes`.
    """

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(
            jnp.zeros((num_blocks + 1, each.num_kv_heads, block_size, each.head_dim), dtype)
            for each in ((model,) if draft is None else (model, draft))
            for _ in range(each.num_layers)
        )

    return KVCache(k=zeros(), v=zeros())


def write_kv(
    cache: KVCache, layer: int, k_TKd: jax.Array, v_TKd: jax.Array, slot_mapping_T: jax.Array
) -> KVCache:
    """Scatter a batch's keys and values of one layer to their slots (int32, block * b + offset)."""
    block_size = cache.k[layer].shape[2]
    block, offset = lax.div(slot_mapping_T, block_size), lax.rem(slot_mapping_T, block_size)

    def scatter(pool_NKbd: jax.Array, new_TKd: jax.Array) -> jax.Array:
        # Slots come from the block tables of the plan, so they are in bounds by construction.
        return pool_NKbd.at[block, :, offset].set(
            new_TKd.astype(pool_NKbd.dtype), mode="promise_in_bounds", wrap_negative_indices=False
        )

    k, v = list(cache.k), list(cache.v)
    k[layer], v[layer] = scatter(k[layer], k_TKd), scatter(v[layer], v_TKd)
    return KVCache(k=tuple(k), v=tuple(v))


def copy_blocks(cache: KVCache, pairs_C2: jax.Array) -> KVCache:
    """Copy whole blocks, source -> destination, in every layer (copy-on-write).

    Args:
      pairs_C2: int32 [COPY_BATCH, 2]; unused pairs are (0, 0), which copies the sink onto itself. No destination
        may be a source in the same call.
    """
    source, destination = pairs_C2[:, 0], pairs_C2[:, 1]
    copy = lambda pool: pool.at[destination].set(pool[source])  # noqa: E731
    return KVCache(k=tuple(map(copy, cache.k)), v=tuple(map(copy, cache.v)))


def gather_blocks(cache: KVCache, block_ids_G: jax.Array) -> jax.Array:
    """Whole blocks in one array [SWAP_BATCH, values], all layers' keys first: what `HostPool` keeps.

    Args:
      block_ids_G: int32 [SWAP_BATCH]; unused ones are the sink's.
    """
    # Flat, because layers of a draft model have other shapes than the target's.
    parts = [pool[block_ids_G].reshape(SWAP_BATCH, -1) for pool in (*cache.k, *cache.v)]
    return jnp.concatenate(parts, axis=1)


def scatter_blocks(cache: KVCache, block_ids_G: jax.Array, blocks: jax.Array) -> tuple[KVCache, jax.Array]:
    """Write what `gather_blocks` gives into blocks.

    Args:
      block_ids_G: int32 [SWAP_BATCH]; no block twice, but for the sink, which unused ones name.

    Returns:
      The cache, and a number that is there when the cache is: the cache itself is donated to what comes next.
    """
    written: list[jax.Array] = []
    start = 0
    for pool in (*cache.k, *cache.v):
        shape = pool.shape[1:]
        stop = start + math.prod(shape)
        written.append(pool.at[block_ids_G].set(blocks[:, start:stop].reshape(SWAP_BATCH, *shape)))
        start = stop
    num_layers = len(cache.k)
    return KVCache(k=tuple(written[:num_layers]), v=tuple(written[num_layers:])), block_ids_G[0]
