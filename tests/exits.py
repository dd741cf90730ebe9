"""Exits with random weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.models.exit import TOKEN_IDS, ExitShape, exit_specs
from jaxserve.models.registry import set_by_path


def exit_shape(model: ModelConfig, *, num_tokens: int = 48, inner_size: int = 16) -> ExitShape:
    return ExitShape(model.hidden_size, inner_size, num_tokens, model.rms_norm_eps)


def random_exit(shape: ExitShape, vocab_size: int, seed: int = 0) -> dict[str, Any]:
    """Parameters as `exit_specs` names them; the tokens it knows are spread over the vocabulary."""
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for spec in exit_specs(shape):
        if spec.path == TOKEN_IDS:
            value = np.sort(rng.choice(vocab_size, shape.num_tokens, replace=False)).astype(np.int32)
        elif spec.path[-1] == "scale":
            value = rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        else:
            value = (rng.standard_normal(spec.shape) * spec.shape[-1] ** -0.5).astype(np.float32)
        set_by_path(params, spec.path, jnp.asarray(value))
    return params
