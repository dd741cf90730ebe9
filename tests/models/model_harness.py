"""What the model tests share: whole-sequence logits, and the small models that the reference was recorded on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.checkpoint.hf_config import parse_model_config
from jaxserve.config import ModelConfig
from jaxserve.models.registry import get_family, set_by_path
from scripts.reference import tiny_models
from tests.models.dense_attend import dense_attend

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "reference"


def tiny_config(case: str) -> ModelConfig:
    """The configuration of one recorded case, through the parser that reads a checkpoint's config.json."""
    return parse_model_config(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **tiny_models.CASES[case]}, where=case
    )


def tiny_params(case: str, dtype: Any = jnp.float32) -> dict[str, Any]:
    config = tiny_config(case)
    params: dict[str, Any] = {}
    for spec in get_family(config.architecture).weight_specs(config):
        set_by_path(params, spec.path, jnp.asarray(tiny_models.weight(case, spec.hf_name, spec.shape), dtype))
    return params


def abstract_model(config: ModelConfig, dtype: Any) -> nnx.Module:
    build = get_family(config.architecture).build
    return nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0)))


def sequence_logits(
    config: ModelConfig, params: dict[str, Any], dtype: Any = jnp.float32
) -> Callable[[Sequence[int]], np.ndarray]:
    """token ids [T] -> float32 logits [T, V], every token of one sequence at once."""
    graph, state = nnx.split(abstract_model(config, dtype))
    nnx.replace_by_pure_dict(state, params)

    @jax.jit
    def compiled(state: nnx.State, token_ids_T: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        positions_T = jnp.arange(token_ids_T.shape[0], dtype=jnp.int32)
        hidden_TD, _ = model(token_ids_T, positions_T, None, dense_attend)
        return model.compute_logits(hidden_TD)

    def run(token_ids: Sequence[int]) -> np.ndarray:
        # Few lengths, few compilations; nobody looks back at the padding, which comes last.
        padded_length = next((n for n in (128, 512) if n >= len(token_ids)), -(-len(token_ids) // 64) * 64)
        padded_T = np.zeros(padded_length, np.int32)
        padded_T[: len(token_ids)] = token_ids
        return np.asarray(compiled(state, padded_T))[: len(token_ids)]

    return run
