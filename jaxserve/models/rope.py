"""Rotary position embedding: which angle each pair of dimensions turns by, and the turning.

Frequencies are worked out on the host in float64 from the config alone, so they are constants of the compiled
step and never part of a checkpoint. Sources: RoFormer (arXiv 2104.09864); linear position interpolation
(arXiv 2306.15595); YaRN (arXiv 2309.00071); `llama3` as published with Llama 3.1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.config import RopeConfig
from jaxserve.errors import CheckpointError


def rope_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int
) -> tuple[NDArray[np.float32], float]:
    """Radians a token position advances each pair of dimensions, and the factor on cos and sin.

    Args:
      max_position_embeddings: stands in for `rope.original_max_position_embeddings` where that is None.

    Returns:
      (float32 [head_dim / 2], factor); the factor is 1.0 for every type but yarn.

    Raises:
      CheckpointError: odd head size, a factor out of range, or a type this file does not know.
    """
    if head_dim % 2:
        raise CheckpointError(f"rotary embedding needs an even head_dim, got {head_dim}")
    if rope.rope_type != "default" and not rope.factor > 0:
        raise CheckpointError(f"rope scaling factor must be above 0, got {rope.factor}")
    base = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original_context = rope.original_max_position_embeddings or max_position_embeddings
    attention_factor = 1.0
    match rope.rope_type:
        case "default":
            frequencies = base
        case "linear":
            frequencies = base / rope.factor
        case "llama3":
            frequencies = _llama3(base, rope, original_context)
        case "yarn":
            frequencies = _yarn(base, rope, head_dim, original_context)
            attention_factor = _yarn_attention_factor(rope)
        case unknown:
            raise CheckpointError(
                f"unsupported rope_type {unknown!r}; supported: default, linear, llama3, yarn"
            )
    return frequencies.astype(np.float32), attention_factor


def _llama3(base: NDArray[np.float64], rope: RopeConfig, original_context: int) -> NDArray[np.float64]:
    """Long waves are stretched by `factor`, short ones kept, and those between blended."""
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"rope high_freq_factor ({rope.high_freq_factor}) must be above low_freq_factor ({rope.low_freq_factor})"
        )
    turns_in_context = original_context * base / (2 * math.pi)
    kept = (turns_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * base + (1 - kept) * base / rope.factor


def _yarn(
    base: NDArray[np.float64], rope: RopeConfig, head_dim: int, original_context: int
) -> NDArray[np.float64]:
    """Dimensions that turn often keep their frequency, slow ones are interpolated, with a linear ramp between."""

    def dimension_turning(turns: float) -> float:
        return head_dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001  # a step, without dividing by zero
    interpolated = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
    return base * (1 - interpolated) + base / rope.factor * interpolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rope_cos_sin(
    positions_T: jax.Array, frequencies_d: NDArray[np.float32], attention_factor: float
) -> tuple[jax.Array, jax.Array]:
    """int [T] -> cos and sin, each float32 [T, head_dim / 2], already times `attention_factor`."""
    angles_Td = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(frequencies_d)[None, :]
    return jnp.cos(angles_Td) * attention_factor, jnp.sin(angles_Td) * attention_factor


def apply_rope(x_THd: jax.Array, cos_Td: jax.Array, sin_Td: jax.Array) -> jax.Array:
    """Turn every head of [T, H, head_dim]: dimension i pairs with i + head_dim / 2 (Hugging Face's layout).

    Computed in float32, returned in x's dtype.
    """
    first, second = jnp.split(x_THd.astype(jnp.float32), 2, axis=-1)
    cos_T1d, sin_T1d = cos_Td[:, None, :], sin_Td[:, None, :]
    turned = jnp.concatenate(
        [first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d], axis=-1
    )
    return turned.astype(x_THd.dtype)
