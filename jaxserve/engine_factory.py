"""From a model's name or path to a warmed-up engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.batch.buckets import step_limits
from jaxserve.batch.builder import BatchBuilder
from jaxserve.batch.step_trace import StepRecorder
from jaxserve.config import EngineConfig
from jaxserve.device.host_allocator import keep_freed_memory
from jaxserve.device.model_runner import ModelRunner
from jaxserve.device.program_eviction import evict_programs
from jaxserve.engine import EngineCore
from jaxserve.engine_setup import cache_directory, plan_memory_of, set_up
from jaxserve.progress import NullProgress, Progress
from jaxserve.recording.recorded_engine import RecordedEngine, recording_options
from jaxserve.speculative.device_proposer import DeviceProposer
from jaxserve.speculative.factory import create_proposer
from pallas_kernels.paged_attention import facts_of

logger = logging.getLogger("jaxserve.memory")


def create_engine(
    model: str | Path,
    options: EngineConfig | None = None,
    *,
    served_name: str | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
    wait_for_programs: bool = True,
    make: Callable[..., EngineCore] | None = None,
) -> EngineCore:
    """Open a model, load it, size the KV cache, and load or compile every shape.

    Args:
      model: a known name (fetched and converted on first use), a Hugging Face directory, a GGUF file, or a store.
      served_name: what clients call the model; the checkpoint's own name by default.
      store: where fetched models are kept.
      wait_for_programs: return when every shape is ready; otherwise as soon as any step can run, while the rest is
        made in the background.
      make: takes what `EngineCore` does; None is that, or what records if `options` ask for it.

    Raises:
      CheckpointError, ConfigError: one line each.
    """
    options = options or EngineConfig()
    progress = progress or NullProgress()
    device = facts_of(jax.local_devices()[0])
    setup = set_up(model, options, device, store=store, progress=progress)
    checkpoint, config = setup.checkpoint, setup.config
    tokenizer = checkpoint.load_tokenizer()  # now, because its chat template may be wrong
    recorder = StepRecorder(Path(options.record_steps), step_limits(config)) if options.record_steps else None
    recording = recording_options(model, options)
    plan = plan_memory_of(setup, options, progress)
    params = checkpoint.load_params(
        jnp.dtype(config.dtype), quantization=config.quantization, progress=progress
    )
    draft_params = setup.load_draft_params(progress)
    runner = ModelRunner(
        checkpoint.config,
        config,
        params,
        attention=setup.attention,
        num_blocks=plan.num_blocks,
        host=plan.host,
        buckets=setup.buckets,
        cache_directory=cache_directory(options),
        maker=plan.maker,
        draft=setup.draft,
        draft_params=draft_params,
    )
    drafts = setup.draft is not None
    # A recording knows which shapes were ready for steps, not for drafts.
    runner.warm_up(progress, wait_for_all=wait_for_programs or (drafts and recording is not None))
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    if (programs := cache_directory(options)) is not None:
        evict_programs(programs, options.program_cache_bytes)
    if make is None:
        make = EngineCore if recording is None else partial(RecordedEngine, recording=recording)
    builder = BatchBuilder(runner.buckets, block_size=config.block_size, padding_row=runner.padding_row)
    engine = make(
        model_name=served_name or checkpoint.name,
        config=config,
        model_config=checkpoint.config,
        generation=checkpoint.generation,
        tokenizer=tokenizer,
        runner=runner,
        buckets=runner.buckets,
        num_blocks=plan.num_blocks,
        host=plan.host,
        recorder=recorder,
        builder=builder,
        proposer=DeviceProposer(runner, builder) if drafts else create_proposer(config),
    )
    account = runner.account(temporaries=plan.account.temporaries)
    logger.info("as accounted before serving:")
    for line in account.table().splitlines():
        logger.info("%s", line)
    engine.stats.memory = account.by_kind()
    return engine
