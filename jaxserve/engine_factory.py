"""From a model's name or path to a warmed-up engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.batch.bucket_plan_file import read_plan
from jaxserve.batch.buckets import default_buckets, planned_buckets, step_limits
from jaxserve.batch.step_trace import StepRecorder
from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.host_allocator import keep_freed_memory
from jaxserve.device.memory_plan import plan_memory
from jaxserve.device.model_runner import ModelRunner
from jaxserve.device.program_eviction import evict_programs
from jaxserve.engine import EngineCore
from jaxserve.model_store import default_store
from jaxserve.progress import NullProgress, Progress

logger = logging.getLogger("jaxserve.memory")


def create_engine(
    model: str | Path,
    options: EngineConfig | None = None,
    *,
    served_name: str | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
    wait_for_programs: bool = True,
) -> EngineCore:
    """Open a model, load it, size the KV cache, and load or compile every shape.

    Args:
      model: a known name (fetched and converted on first use), a Hugging Face directory, a GGUF file, or a store.
      served_name: what clients call the model; the checkpoint's own name by default.
      store: where fetched models are kept.
      wait_for_programs: return when every shape is ready; otherwise as soon as any step can run, while the rest is
        made in the background.

    Raises:
      CheckpointError, ConfigError: one line each.
    """
    options = options or EngineConfig()
    progress = progress or NullProgress()
    shapes = read_plan(Path(options.bucket_plan)) if options.bucket_plan else None
    checkpoint = open_checkpoint(resolve_model(str(model), store=store or default_store(), progress=progress))
    config = resolve(options, checkpoint.config, platform=jax.default_backend())
    attention = choose_attention(checkpoint.config, config)  # early: an error should cost no time
    buckets = planned_buckets(shapes, config) if shapes else default_buckets(config)
    recorder = StepRecorder(Path(options.record_steps), step_limits(config)) if options.record_steps else None
    cache_directory, dtype = _cache_directory(options), jnp.dtype(config.dtype)
    plan = plan_memory(
        options,
        config,
        checkpoint.config,
        weights=checkpoint.param_bytes(dtype, quantization=config.quantization),
        attention=attention,
        buckets=buckets,
        cache_directory=cache_directory,
        progress=progress,
    )
    params = checkpoint.load_params(dtype, quantization=config.quantization, progress=progress)
    runner = ModelRunner(
        checkpoint.config,
        config,
        params,
        attention=attention,
        num_blocks=plan.num_blocks,
        buckets=buckets,
        cache_directory=cache_directory,
        maker=plan.maker,
    )
    del params  # the runner's alone now: closing it frees them
    runner.warm_up(progress, wait_for_all=wait_for_programs)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    if cache_directory is not None:
        evict_programs(cache_directory, options.program_cache_bytes)
    engine = EngineCore(
        model_name=served_name or checkpoint.name,
        config=config,
        model_config=checkpoint.config,
        generation=checkpoint.generation,
        tokenizer=checkpoint.load_tokenizer(),
        runner=runner,
        buckets=runner.buckets,
        num_blocks=plan.num_blocks,
        recorder=recorder,
    )
    account = runner.account(temporaries=plan.account.temporaries)
    logger.info("memory, as accounted before serving:\n%s", account.table())
    engine.stats.memory = account.by_kind()
    return engine


def _cache_directory(options: EngineConfig) -> Path | None:
    if options.compilation_cache_dir is not None:
        return Path(options.compilation_cache_dir) if options.compilation_cache_dir else None
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jaxserve" / "executables"
