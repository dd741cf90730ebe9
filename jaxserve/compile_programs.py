"""From a model's name or path to all programs of its engine, compiled and kept: nothing is loaded, nothing runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import EngineConfig
from jaxserve.device.ahead_of_time import compile_missing, definitions_of
from jaxserve.device.deviceless import identity_of, lowering_for, target_sharding
from jaxserve.device.executable_cache import ExecutableCache
from jaxserve.device.program_definitions import Programs, describe_programs
from jaxserve.device.program_eviction import evict_programs
from jaxserve.device.programs import open_cache, program_keys
from jaxserve.device.targets import Target
from jaxserve.engine_setup import cache_directory, plan_memory_of, set_up
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
    root = programs_folder(options)
    made = (
        _for_target(model, options, target, root, progress)
        if target
        else _for_this_device(model, options, progress)
    )
    if made.cache is None:
        backend = made.programs.identity["attention"]["backend"].name
        raise ConfigError(
            f"programs of the attention backend {backend} can't be kept, as they run in an interpreter"
        )
    try:
        programs = made.programs
        keys = program_keys(made.buckets, swaps=programs.swaps, draft=programs.draft_model)
        definitions = definitions_of(programs, keys)
        num_compiled = made.num_compiled + compile_missing(
            definitions, made.cache, made.lowering, threads=os.cpu_count() or 1, progress=progress
        )
        files = [made.cache.directory / f"{definition.name}.bin" for definition in definitions]
        num_bytes = sum(file.stat().st_size for file in files)
        evict_programs(root, options.program_cache_bytes)
    finally:
        made.cache.close()
    return CompiledPrograms(made.cache.directory, len(definitions), num_compiled, num_bytes)


def programs_folder(options: EngineConfig) -> Path:
    """Where an engine with these options looks for programs.

    Raises:
      ConfigError: it keeps none.
    """
    root = cache_directory(options)
    if root is None:
        raise ConfigError("no folder is named to keep programs in")
    return root


@dataclass(frozen=True)
class _Work:
    """What is to be compiled, where to, and how.

    Attributes:
      lowering: what programs are lowered inside of.
      num_compiled: programs that had to be compiled to come this far.
    """

    programs: Programs
    buckets: ShapeBuckets
    cache: ExecutableCache | None
    lowering: Callable[[], AbstractContextManager[None]] = nullcontext
    num_compiled: int = 0


def _for_this_device(model: str | Path, options: EngineConfig, progress: Progress) -> _Work:
    """As the engine does: the pool's size depends on what the largest programs need, so these are compiled first."""
    setup = set_up(model, options, facts_of(jax.local_devices()[0]), store=None, progress=progress)
    plan = plan_memory_of(setup, options, progress)
    return _Work(plan.maker.programs, setup.buckets, plan.maker.cache, num_compiled=plan.maker.num_compiled)


def _for_target(
    model: str | Path, options: EngineConfig, target: Target, root: Path, progress: Progress
) -> _Work:
    if options.num_blocks is None:
        raise ConfigError(
            "--num-blocks must be given with --target: programs hold the size of the KV cache, and how much memory the "
            "GPU will have free is known only there; start the engine with the same number"
        )
    sharding = target_sharding(target)
    setup = set_up(model, options, target.facts, store=None, progress=progress)
    programs = describe_programs(
        setup.checkpoint.config,
        setup.config,
        attention=setup.attention,
        num_blocks=options.num_blocks,
        platform=target.facts.platform,
        sharding=sharding,
        draft=setup.draft,
    )
    cache = open_cache(programs, root, identity_of(target))
    return _Work(programs, setup.buckets, cache, partial(lowering_for, target))
