from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ModelConfig
from jaxserve.device import kv_cache
from jaxserve.device.kv_cache import COPY_BATCH, KVCache, copy_blocks, write_kv
from jaxserve.device.model_runner import _independent_groups

MODEL = ModelConfig("LlamaForCausalLM", 64, 32, 64, 2, 4, 2, 8, 128)
BLOCKS, BLOCK_SIZE = 9, 4  # usable blocks; the sink comes on top


def random_cache(rng: np.random.Generator, dtype: jnp.dtype) -> KVCache:
    shape = (BLOCKS + 1, MODEL.num_kv_heads, BLOCK_SIZE, MODEL.head_dim)
    fill = lambda: tuple(jnp.asarray(rng.normal(0, 1, shape), dtype) for _ in range(MODEL.num_layers))  # noqa: E731
    return KVCache(fill(), fill())


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_has_its_sink_and_its_price(dtype: jnp.dtype) -> None:
    cache = kv_cache.allocate(MODEL, BLOCKS, BLOCK_SIZE, dtype)
    arrays = jax.tree.leaves(cache)
    assert len(arrays) == 2 * MODEL.num_layers
    assert all(a.shape == (BLOCKS + 1, 2, BLOCK_SIZE, 8) and a.dtype == dtype for a in arrays)
    assert not any(np.asarray(a, np.float32).any() for a in arrays)
    each = kv_cache.block_bytes(MODEL, BLOCK_SIZE, dtype)
    assert sum(a.nbytes for a in arrays) == each * (BLOCKS + 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layer", [0, 1])
def test_writes_land_in_their_slots_and_nowhere_else(layer: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(layer)
    cache = random_cache(rng, dtype)
    last = (BLOCKS + 1) * BLOCK_SIZE - 1
    slots = np.array(
        [last, BLOCK_SIZE, 17, 4 * BLOCK_SIZE + 3, last - 1, 0, 0, 0], np.int32
    )  # three of padding
    k, v = rng.normal(0, 1, (2, len(slots), 2, 8)).astype(np.float32)
    after = jax.jit(write_kv, static_argnums=1)(
        cache, layer, jnp.asarray(k, dtype), jnp.asarray(v, dtype), slots
    )
    for new, old, values in ((after.k, cache.k, k), (after.v, cache.v, v)):
        assert np.array_equal(bits(new[1 - layer]), bits(old[1 - layer])), "another layer was touched"
        want = np.asarray(old[layer]).copy()
        for slot, value in zip(slots, values, strict=True):
            want[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = np.asarray(jnp.asarray(value, dtype))
        got = np.asarray(new[layer]).copy()
        assert any(np.array_equal(got[0, :, 0], np.asarray(jnp.asarray(values[i], dtype))) for i in (5, 6, 7))
        got[0, :, 0] = want[0, :, 0] = 0  # whose padding the sink holds does not matter
        assert np.array_equal(got.view(np.uint8), want.view(np.uint8))


def test_values_are_stored_in_the_dtype_of_the_pool() -> None:
    cache = kv_cache.allocate(MODEL, BLOCKS, BLOCK_SIZE, jnp.bfloat16)
    after = write_kv(
        cache, 0, jnp.full((1, 2, 8), 1.001), jnp.full((1, 2, 8), 3.0), jnp.array([5], jnp.int32)
    )
    assert after.k[0].dtype == jnp.bfloat16
    assert float(after.v[0][1, 0, 1, 0]) == 3.0


Pairs = list[tuple[int, int]]
jitted_copy = jax.jit(copy_blocks)


def run_groups(cache: KVCache, pairs: Pairs) -> KVCache:
    for group in _independent_groups(tuple(pairs), COPY_BATCH):
        padded = np.zeros((COPY_BATCH, 2), np.int32)
        padded[: len(group)] = group
        cache = jitted_copy(cache, padded)
    return cache


def one_by_one(pool: jax.Array, pairs: Pairs) -> np.ndarray:
    want = np.asarray(pool).copy()
    for source, destination in pairs:
        want[destination] = want[source]
    return want


@given(pairs=st.lists(st.tuples(st.integers(1, BLOCKS), st.integers(1, BLOCKS)), max_size=40))
@settings(max_examples=150)
def test_copies_are_as_if_made_one_by_one(pairs: Pairs) -> None:
    """Chains, swaps, repeated destinations, a block onto itself, more pairs than one call takes."""
    cache = random_cache(np.random.default_rng(0), jnp.float32)
    after = run_groups(cache, pairs)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        assert np.array_equal(bits(new), one_by_one(old, pairs).view(np.uint8))


@given(pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60))
def test_no_group_depends_on_the_order_within(pairs: Pairs) -> None:
    groups = list(_independent_groups(tuple(pairs), COPY_BATCH))
    assert [pair for group in groups for pair in group] == pairs
    for group in groups:
        assert 1 <= len(group) <= COPY_BATCH
        destinations = [destination for _, destination in group]
        assert len(set(destinations)) == len(destinations), (
            "written twice: the order of a scatter is undefined"
        )
        overlap = {s for s, d in group if s != d} & set(destinations)
        assert not overlap, f"{overlap} read and written"


def test_independent_copies_share_as_few_calls_as_possible() -> None:
    pairs = tuple((1, 10 + i) for i in range(2 * COPY_BATCH + 1))
    assert [len(group) for group in _independent_groups(pairs, COPY_BATCH)] == [COPY_BATCH, COPY_BATCH, 1]
    assert list(_independent_groups((), COPY_BATCH)) == []


def test_unused_pairs_leave_everything_alone() -> None:
    cache = random_cache(np.random.default_rng(1), jnp.bfloat16)
    after = jitted_copy(cache, np.zeros((COPY_BATCH, 2), np.int32))
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        assert np.array_equal(bits(new), bits(old))
