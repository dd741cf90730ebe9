"""What is decided before an engine is made, or its programs are compiled: model, limits, attention, shapes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.batch.bucket_plan_file import read_plan
from jaxserve.batch.buckets import ShapeBuckets, default_buckets, planned_buckets
from jaxserve.checkpoint import Checkpoint, open_checkpoint, resolve_model
from jaxserve.checkpoint.exit_store import ExitCheckpoint, open_exit
from jaxserve.config import (
    NGRAM,
    EngineConfig,
    ModelConfig,
    ResolvedConfig,
    exit_path,
    resolve,
    self_draft_layers,
)
from jaxserve.device.attention import choose_attention
from jaxserve.device.draft_model import DraftModel, first_layers
from jaxserve.device.memory_plan import MemoryPlan, plan_memory
from jaxserve.errors import ConfigError
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
    draft: DraftModel | None = None
    draft_checkpoint: Checkpoint | ExitCheckpoint | None = None  # of what it has weights of its own for

    @property
    def param_bytes(self) -> int:
        """What all weights will take on the device."""
        dtype, quantization = jnp.dtype(self.config.dtype), self.config.quantization
        own, draft = self.checkpoint.param_bytes(dtype, quantization=quantization), self.draft_checkpoint
        if draft is None:
            return own
        if isinstance(draft, ExitCheckpoint):
            return own + draft.param_bytes(dtype.itemsize)
        return own + draft.param_bytes(dtype, quantization=quantization)

    def load_draft_params(self, progress: Progress) -> dict[Any, Any] | None:
        """Weights of a draft model, or of an exit; None: what drafts has none of its own."""
        dtype, draft = jnp.dtype(self.config.dtype), self.draft_checkpoint
        if draft is None:
            return None
        if isinstance(draft, ExitCheckpoint):
            return draft.load_params(dtype)
        return draft.load_params(dtype, quantization=self.config.quantization, progress=progress)


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
    draft_checkpoint = _open_draft(checkpoint, config, store=store, progress=progress)
    draft = _choose_draft(checkpoint.config, config, attention, device, draft_checkpoint)
    return EngineSetup(checkpoint, config, attention, buckets, draft, draft_checkpoint)


def _open_draft(
    target: Checkpoint, config: ResolvedConfig, *, store: Path | None, progress: Progress
) -> Checkpoint | ExitCheckpoint | None:
    name = config.speculative
    if name is None or name == NGRAM or self_draft_layers(name) is not None:
        return None
    if (path := exit_path(name)) is not None:
        return open_exit(Path(path), target.config, target.tokenizer_parts)
    checkpoint = open_checkpoint(resolve_model(name, store=store or default_store(), progress=progress))
    words = [each.tokenizer_parts.backend.get_vocab(with_added_tokens=True) for each in (target, checkpoint)]
    if words[0] != words[1] or target.config.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"speculative: {checkpoint.name} can't draft for {target.name}, its vocabulary is another one"
        )
    if checkpoint.config.max_position_embeddings < config.max_model_len:
        raise ConfigError(
            f"speculative: the draft model's context of {checkpoint.config.max_position_embeddings} tokens is shorter "
            f"than max_model_len {config.max_model_len}"
        )
    return checkpoint


def _choose_draft(
    target: ModelConfig,
    config: ResolvedConfig,
    attention: Backend,
    device: DeviceFacts,
    checkpoint: Checkpoint | ExitCheckpoint | None,
) -> DraftModel | None:
    most = config.num_speculative_tokens
    if isinstance(checkpoint, ExitCheckpoint):
        return first_layers(target, checkpoint.num_layers, attention, most, checkpoint.shape)
    if checkpoint is not None:
        own = choose_attention(checkpoint.config, config, device)
        return DraftModel(checkpoint.config, is_own=True, attention=own, max_tokens=most)
    layers = self_draft_layers(config.speculative or "")
    return None if layers is None else first_layers(target, layers, attention, most)


def plan_memory_of(setup: EngineSetup, options: EngineConfig, progress: Progress) -> MemoryPlan:
    """The size of the engine's pool on the device that is here, which its programs depend on; see `plan_memory`."""
    checkpoint, config = setup.checkpoint, setup.config
    return plan_memory(
        options,
        config,
        checkpoint.config,
        weights=setup.param_bytes,
        attention=setup.attention,
        buckets=setup.buckets,
        cache_directory=cache_directory(options),
        progress=progress,
        draft=setup.draft,
    )


def cache_directory(options: EngineConfig) -> Path | None:
    """Where compiled programs are kept between starts; None keeps none."""
    if options.compilation_cache_dir is not None:
        return Path(options.compilation_cache_dir) if options.compilation_cache_dir else None
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jaxserve" / "executables"
