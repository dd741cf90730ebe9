"""What a machine can do at best: the rates behind the floor of a step's time. Measured, not looked up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_READ_BYTES = 2**29  # larger than any cache
_SIZE = 1024  # rows and columns of the matrices
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Medians.

    Attributes:
      bytes_per_second: reading a large array, in a sum of it.
      flops_per_second: a product of two square matrices.
    """

    bytes_per_second: float
    flops_per_second: float

    def floor(self, *, num_bytes: float, flops: float) -> float:
        """Seconds that so much takes at least: reading and computing at the same time."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_rates(dtype: Any) -> MachineRates:
    """Rates of this process's device, products in `dtype`."""
    array = jnp.ones(_READ_BYTES // 4, jnp.float32)
    matrix = jnp.ones((_SIZE, _SIZE), dtype)
    read = _seconds(jax.jit(jnp.sum), array)
    multiply = _seconds(jax.jit(lambda a: a @ a), matrix)
    return MachineRates(array.nbytes / read, 2 * _SIZE**3 / multiply)


def _seconds(function: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    function(argument).block_until_ready()
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        function(argument).block_until_ready()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
