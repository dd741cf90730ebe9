"""From a model's name or path to all programs of its engine, compiled and kept: nothing is loaded, nothing runs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from jaxserve.config import EngineConfig
from jaxserve.device.ahead_of_time import compile_missing, definitions_of
from jaxserve.device.deviceless import identity_of, lowering_for, target_sharding
from jaxserve.device.memory import plan_num_blocks
from jaxserve.device.program_definitions import describe_programs
from jaxserve.device.program_eviction import evict_programs
from jaxserve.device.program_manifest import local_device
from jaxserve.device.programs import open_cache, program_keys
from jaxserve.device.targets import Target
from jaxserve.engine_setup import cache_directory, set_up
from jaxserve.errors import ConfigError
from jaxserve.progress import Progress
from pallas_kernels.paged_attention import facts_of


@dataclass(frozen=True)
class CompiledPrograms:
    """What `compile_programs` has done.

    Attributes:
      folder: where the programs lie.
      num_programs: all that the engine may ever run.
      num_compiled: those that were not there before.
      num_bytes: of all of them, on disk.
    """

    folder: Path
    num_programs: int
    num_compiled: int
    num_bytes: int


def compile_programs(
    model: str | Path, options: EngineConfig, *, target: Target | None, progress: Progress
) -> CompiledPrograms:
    """Compile what an engine with these options needs, into the cache folder that they name.

    Args:
      target: a GPU that is not here; None is the device that is.

    Raises:
      CheckpointError, ConfigError: one line each.
    """
    root = cache_directory(options)
    if root is None:
        raise ConfigError("no folder is named to keep programs in")
    here = jax.local_devices()[0]
    device = target.facts if target else facts_of(here)
    if options.num_blocks is None and device.platform != "cpu":
        raise ConfigError(
            "--num-gpu-blocks-override must be given: programs hold the size of the KV cache, and what a GPU has "
            "room for is known only when the weights are on it; start the engine with the same number"
        )
    setup = set_up(model, options, device, store=None, progress=progress)
    programs = describe_programs(
        setup.checkpoint.config,
        setup.config,
        attention=setup.attention,
        num_blocks=plan_num_blocks(options, setup.config, setup.checkpoint.config),
        platform=device.platform,
        sharding=target_sharding(target) if target else SingleDeviceSharding(here),
    )
    cache = open_cache(programs, root, identity_of(target) if target else local_device())
    if cache is None:
        raise ConfigError(f"programs of the attention backend {setup.attention.name} can't be kept")
    try:
        definitions = definitions_of(programs, program_keys(setup.buckets))
        num_compiled = compile_missing(
            definitions,
            cache,
            partial(lowering_for, target) if target else nullcontext,
            threads=os.cpu_count() or 1,
            progress=progress,
        )
        num_bytes = sum(
            (cache.directory / f"{definition.name}.bin").stat().st_size for definition in definitions
        )
        evict_programs(root, options.program_cache_bytes)
    finally:
        cache.close()
    return CompiledPrograms(cache.directory, len(definitions), num_compiled, num_bytes)
