"""Compiling one function for a GPU that is not there, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.device.deviceless import lowering_for, target_sharding
from jaxserve.device.targets import Target


@dataclass(frozen=True)
class Compiled:
    """An executable for the target, and the seconds that lowering and compiling took."""

    executable: Any
    lower_seconds: float
    compile_seconds: float


def compile_for(
    target: Target, function: Callable[..., Any], arguments: tuple[Any, ...], *, donate: tuple[int, ...] = ()
) -> Compiled:
    """Compile `function` for abstract `arguments` (pytrees of `jax.ShapeDtypeStruct`)."""
    sharding = target_sharding(target)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with lowering_for(target):
        start = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed)
        middle = time.perf_counter()
        executable = lowered.compile()
    return Compiled(executable, middle - start, time.perf_counter() - middle)
