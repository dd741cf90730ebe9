"""What is decided before an engine is made, or its programs are compiled: model, limits, attention, shapes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxserve.batch.bucket_plan_file import read_plan
from jaxserve.batch.buckets import ShapeBuckets, default_buckets, planned_buckets
from jaxserve.checkpoint import Checkpoint, open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, ResolvedConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.memory_plan import MemoryPlan, plan_memory
from jaxserve.model_store import default_store
from jaxserve.progress import Progress
from jaxserve.scheduler.policy_loading import load_policy
from pallas_kernels.paged_attention import Backend, DeviceFacts


@dataclass(frozen=True)
class EngineSetup:
    """Decisions that cost no time, so that an error in them does not either."""

    checkpoint: Checkpoint
    config: ResolvedConfig
    attention: Backend
    buckets: ShapeBuckets


def set_up(
    model: str | Path, options: EngineConfig, device: DeviceFacts, *, store: Path | None, progress: Progress
) -> EngineSetup:
    """Open a model (its weights are not read) and decide what an engine for it is like.

    Args:
      model, store: see `engine_factory.create_engine`.
      device: what it will run on.

    Raises:
      CheckpointError, ConfigError: one line each.
    """
    shapes = read_plan(Path(options.bucket_plan)) if options.bucket_plan else None
    checkpoint = open_checkpoint(resolve_model(str(model), store=store or default_store(), progress=progress))
    config = resolve(options, checkpoint.config, platform=device.platform)
    if config.scheduler != "static":
        load_policy(config)  # so that an error in it comes now
    attention = choose_attention(checkpoint.config, config, device)
    buckets = planned_buckets(shapes, config) if shapes else default_buckets(config)
    return EngineSetup(checkpoint, config, attention, buckets)


def plan_memory_of(setup: EngineSetup, options: EngineConfig, progress: Progress) -> MemoryPlan:
    """The size of the engine's pool on the device that is here, which its programs depend on; see `plan_memory`."""
    checkpoint, config = setup.checkpoint, setup.config
    return plan_memory(
        options,
        config,
        checkpoint.config,
        weights=checkpoint.param_bytes(jnp.dtype(config.dtype), quantization=config.quantization),
        attention=setup.attention,
        buckets=setup.buckets,
        cache_directory=cache_directory(options),
        progress=progress,
    )


def cache_directory(options: EngineConfig) -> Path | None:
    """Where compiled programs are kept between starts; None keeps none."""
    if options.compilation_cache_dir is not None:
        return Path(options.compilation_cache_dir) if options.compilation_cache_dir else None
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jaxserve" / "executables"
