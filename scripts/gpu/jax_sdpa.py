"""The alternative within JAX: `jax.nn.dot_product_attention` on contiguous keys and values, by cuDNN on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu.jobs import Case
from scripts.gpu.measure import median_seconds
from scripts.gpu.workplace import Workplace


def time_decode(case: Case, place: Workplace) -> dict[str, Any]:
    """`batch` rows, each with its own `context` contiguous tokens. Same numbers as our paged case of that shape."""
    batch, context = case["batch"], case["context"]
    q = _random((batch, 1, case["kv_heads"] * case["group"], case["head_dim"]), case, 0)
    shape = (batch, context, case["kv_heads"], case["head_dim"])
    pairs = tuple(
        (_random(shape, case, 2 * i + 1), _random(shape, case, 2 * i + 2)) for i in range(case["launches"])
    )
    call = _chain(_implementation(place), is_causal=False)
    taken = median_seconds(lambda: call(q, pairs), jax.block_until_ready, launches=len(pairs))
    nbytes = sum(x.nbytes for x in pairs[0])
    return {**taken, "bytes": nbytes, "bytes_per_s": nbytes / taken["seconds"]}


def time_prefill(case: Case, place: Workplace) -> dict[str, Any]:
    """`tokens` / `chunk` whole prompts of `chunk` tokens (no context before them)."""
    if case["context"]:
        raise NotImplementedError(
            "a causal mask of this function starts at the first key: no chunk behind a context"
        )
    batch, chunk = case["tokens"] // case["chunk"], case["chunk"]
    num_heads = case["kv_heads"] * case["group"]
    q = _random((batch, chunk, num_heads, case["head_dim"]), case, 0)
    k, v = (_random((batch, chunk, case["kv_heads"], case["head_dim"]), case, i) for i in (1, 2))
    pairs = ((k, v),) * case["launches"]
    call = _chain(_implementation(place), is_causal=True)
    taken = median_seconds(lambda: call(q, pairs), jax.block_until_ready, launches=len(pairs))
    flops = batch * (chunk * (chunk + 1) // 2) * 4 * num_heads * case["head_dim"]
    return {**taken, "flops": flops, "flops_per_s": flops / taken["seconds"]}


def _implementation(place: Workplace) -> str:
    return "xla" if place.cpu else "cudnn"


def _chain(implementation: str, *, is_causal: bool) -> Any:
    attend = partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation=implementation)

    @jax.jit
    def chain(q: jax.Array, pairs: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
        for k, v in pairs:
            q = attend(q, k, v)
        return q

    return chain


def _random(shape: tuple[int, ...], case: Case, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(case["dtype"]))
