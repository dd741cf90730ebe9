"""An engine around a random model, with exactly the shapes that a case needs compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device.model_runner import ModelRunner
from jaxserve.engine import EngineCore
from jaxserve.progress import NullProgress
from pallas_kernels.paged_attention import AttentionSpec, Backend, resolve_backend
from scripts.gpu.correctness import this_device
from scripts.gpu.random_model import NO_END, make_tokenizer


def attention_backend(name: str, model: ModelConfig, config: ResolvedConfig) -> Backend:
    """The backend of a name for a model, on the device that is here.

    Raises:
      NotImplementedError: it can't run this model.
    """
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=config.dtype,
        kv_dtype=config.dtype,
    )
    return resolve_backend(name, spec=spec, device=this_device())


def start_engine(
    model: ModelConfig,
    config: ResolvedConfig,
    params: dict[str, Any],
    backend: Backend,
    *,
    token_sizes: Sequence[int],
    num_blocks: int,
) -> EngineCore:
    """A warmed-up engine. `token_sizes`: the batch sizes T that exist; S is `config.max_num_seqs`, or T if smaller."""
    sizes = tuple((tokens, (min(tokens, config.max_num_seqs),)) for tokens in token_sizes)
    buckets = ShapeBuckets(sizes, config.max_blocks_per_seq)
    runner = ModelRunner(
        model,
        config,
        params,
        attention=backend,
        num_blocks=num_blocks,
        buckets=buckets,
        cache_directory=None,
    )
    runner.warm_up(NullProgress())
    return EngineCore(
        model_name="random",
        config=config,
        model_config=model,
        generation=NO_END,
        tokenizer=make_tokenizer(model.vocab_size),
        runner=runner,
        buckets=buckets,
        num_blocks=num_blocks,
    )
