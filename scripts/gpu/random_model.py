"""Models without a checkpoint: weights drawn on the device, and a tokenizer that names token n "t<n>"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from jaxserve.config import GenerationDefaults, ModelConfig, ResolvedConfig
from jaxserve.models.registry import get_family, set_by_path
from jaxserve.tokenizer import Tokenizer

NO_END = GenerationDefaults()


def model_config(shape: Mapping[str, Any]) -> ModelConfig:
    """A Llama of the sizes that a case names."""
    return ModelConfig(architecture="LlamaForCausalLM", **shape)


def draw_weights(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Parameters as `Checkpoint.load_params` gives, scaled so that activations stay near 1."""
    params: dict[str, Any] = {}
    for index, spec in enumerate(get_family(config.architecture).weight_specs(config)):
        gain = 4.0 if spec.shape[0] == config.vocab_size else 1.0
        draw = _scales if spec.path[-1] == "scale" else partial(_matrix, gain=gain)
        set_by_path(params, spec.path, draw(jax.random.key(index), spec.shape, jnp.dtype(dtype)))
    return params


@partial(jax.jit, static_argnums=(1, 2))
def _scales(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return 1 + 0.1 * jax.random.normal(key, shape, dtype)


@partial(jax.jit, static_argnums=(1, 2), static_argnames="gain")
def _matrix(key: jax.Array, shape: tuple[int, ...], dtype: Any, *, gain: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * (gain * shape[-1] ** -0.5)


def resolved_config(model: ModelConfig, **limits: Any) -> ResolvedConfig:
    """What an engine is configured by; `limits` are fields of `ResolvedConfig`."""
    defaults: dict[str, Any] = {
        "max_prefill_chunk": limits["max_num_batched_tokens"],
        "enable_prefix_caching": False,
        "scheduler": "continuous",
        "max_waiting": 1024,
        "seed": 0,
        "attention_backend": "auto",
    }
    return ResolvedConfig(**(defaults | limits))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    words = {f"t{i}": i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    return Tokenizer(
        backend,
        chat_template=None,
        bos_token=None,
        eos_token=None,
        special_tokens=(),
        add_bos=False,
        template_variables={},
    )
