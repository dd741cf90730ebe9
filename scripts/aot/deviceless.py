"""Compiling a function for a GPU that is not there. Needs the CUDA plugin of JAX, neither a driver nor a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scripts.aot.targets import Target


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
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.config, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with _lowering_for(target):
        start = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed)
        middle = time.perf_counter()
        executable = lowered.compile()
    return Compiled(executable, middle - start, time.perf_counter() - middle)


@contextmanager
def _lowering_for(target: Target) -> Iterator[None]:
    """Pallas asks the current mesh which device it lowers for."""
    device = AbstractDevice(device_kind=target.device_kind, num_cores=target.facts.num_sms, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
