"""What this device can do at best: the denominators of every share that is reported."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu.jobs import Case
from scripts.gpu.measure import median_seconds
from scripts.gpu.workplace import Workplace

_CHAIN = 4


def copy_bandwidth(case: Case, place: Workplace) -> dict[str, Any]:
    """Copying `bytes` of random bfloat16 on the device, bytes read and bytes written both counted.

    Two ways are measured, a plain copy and an addition; the faster one counts. Reading alone (a sum) is
    reported beside it.
    """
    x = jax.random.normal(jax.random.key(0), (case["bytes"] // 2,), jnp.bfloat16)
    ways = {
        "copy": jax.jit(jnp.copy),
        "add": jax.jit(lambda x: x + jnp.bfloat16(1)),
        "read": jax.jit(lambda x: x.sum(dtype=jnp.float32)),
    }
    times = {
        name: median_seconds(partial(way, x), jax.block_until_ready)["seconds"] for name, way in ways.items()
    }
    rate = {name: (1 if name == "read" else 2) * x.nbytes / taken for name, taken in times.items()}
    return {"bytes_per_s": max(rate["copy"], rate["add"]), "by_way": rate}


def matmul_rate(case: Case, place: Workplace) -> dict[str, Any]:
    """A chain of `size` x `size` bfloat16 products of random numbers."""
    size = case["size"]
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    b = b * size**-0.5  # so that a chain of products stays in range

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            a = a @ b
        return a

    taken = median_seconds(lambda: chain(a, b), jax.block_until_ready, launches=_CHAIN)
    return {"flops_per_s": 2 * size**3 / taken["seconds"], **taken}
