"""The paged KV cache: a pytree of preallocated arrays, and pure functions that write to it."""

from __future__ import annotations

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
      k, v: L arrays [N, K, b, d]. A layer's own arrays, so that a step donates and updates each in place.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    def layer(self, index: int) -> KVCache:
        """The cache of one layer."""
        return KVCache((self.k[index],), (self.v[index],))


def join_layers(caches: Sequence[KVCache]) -> KVCache:
    """The cache of several layers, from theirs."""
    return KVCache(
        tuple(pool for cache in caches for pool in cache.k),
        tuple(pool for cache in caches for pool in cache.v),
    )


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes one block takes in all layers, keys and values together."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * jnp.dtype(dtype).itemsize
    return per_token * block_size


def allocate(model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """A cache of `num_blocks` usable blocks plus the sink, all zeros (unused slots must be finite for some kernels)."""
    shape = (num_blocks + 1, model.num_kv_heads, block_size, model.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(model.num_layers))  # noqa: E731
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
    """Whole blocks in one array [SWAP_BATCH, 2 * L, K, b, d], all layers' keys first: what `HostPool` keeps.

    Args:
      block_ids_G: int32 [SWAP_BATCH]; unused ones are the sink's.
    """
    return jnp.stack([pool[block_ids_G] for pool in (*cache.k, *cache.v)], axis=1)


def scatter_blocks(cache: KVCache, block_ids_G: jax.Array, blocks: jax.Array) -> tuple[KVCache, jax.Array]:
    """Write what `gather_blocks` gives into blocks.

    Args:
      block_ids_G: int32 [SWAP_BATCH]; no block twice, but for the sink, which unused ones name.

    Returns:
      The cache, and a number that is there when the cache is: the cache itself is donated to what comes next.
    """
    num_layers = len(cache.k)
    write = lambda pool, index: pool.at[block_ids_G].set(blocks[:, index])  # noqa: E731
    k = tuple(write(pool, index) for index, pool in enumerate(cache.k))
    v = tuple(write(pool, num_layers + index) for index, pool in enumerate(cache.v))
    return KVCache(k=k, v=v), block_ids_G[0]
