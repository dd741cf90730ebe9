"""Untrained weights for tests and benchmarks: a model of any shape without a checkpoint."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.models.registry import get_family, set_by_path


def init_random(config: ModelConfig, dtype: Any, seed: int = 0) -> dict[str, Any]:
    """Random parameters of `config` on the default device, scaled so that activations stay near 1.

    Returns:
      a nested pure dict keyed like `WeightSpec.path`, as `Checkpoint.load_params` gives; equal arguments give
      equal weights on every machine.

    Raises:
      CheckpointError: an architecture nobody has registered.
    """
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for spec in get_family(config.architecture).weight_specs(config):
        # Uniform draws: bits of the generator, so equal everywhere, and quick for large matrices.
        centred = rng.random(spec.shape, dtype=np.float32) - np.float32(0.5)
        match spec.path[-1]:
            case "scale":
                value = 1 + 0.2 * centred
            case "bias":
                value = 0.2 * centred
            case _:
                # A vocabulary matrix is drawn wider, so that logits spread like a trained model's and the
                # best token seldom wins by a rounding error.
                gain = 4.0 if spec.shape[0] == config.vocab_size else 1.0
                value = centred * np.float32(gain * (12 / spec.shape[-1]) ** 0.5)
        set_by_path(params, spec.path, jnp.asarray(value, dtype))
    return params
