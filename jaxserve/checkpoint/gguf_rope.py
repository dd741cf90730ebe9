"""llama3 rope scaling as GGUF stores it: not the settings but their result, one divisor for every frequency."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# The result depends on original_max_position_embeddings, low_freq_factor and high_freq_factor only up to a common
# scale, so one of the three can be fixed; these are the values of the Llama 3 releases.
_ORIGINAL_CONTEXT = 8192
_RELEASED_FACTORS = (1.0, 4.0)
_TOLERANCE = 1e-3


def llama3_rope_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original_context: int
) -> np.ndarray:
    """Divisors of the head_dim/2 rotary frequencies, float64: the rule of the Llama 3.1 release."""
    cycles = original_context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((cycles - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def llama3_rope_from_factors(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The Hugging Face `rope_scaling` that gives these divisors, or None when no llama3 setting does.

    Args:
      factors: [head_dim / 2].
    """
    if (
        factors.shape != (head_dim // 2,)
        or not np.all(np.isfinite(factors))
        or factors.min() < 1 - _TOLERANCE
    ):
        return None
    factor = float(np.round(factors.max(), 4))
    if factor <= 1.0:
        return {"rope_type": "default"}
    for low, high in (_RELEASED_FACTORS, _fit(factors, factor, theta, head_dim)):
        if not low < high:
            continue
        again = llama3_rope_factors(theta, head_dim, factor, low, high, _ORIGINAL_CONTEXT)
        if np.allclose(again, factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _ORIGINAL_CONTEXT,
            }
    return None


def _fit(factors: np.ndarray, factor: float, theta: float, head_dim: int) -> tuple[float, float]:
    """low and high from the frequencies between the two, where `smooth` is a straight line; (0, 0) if too few."""
    cycles = _ORIGINAL_CONTEXT * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    inside = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if inside.sum() < 2:
        return 0.0, 0.0
    slope, offset = np.polyfit(cycles[inside], smooth[inside], 1)
    return float(-offset / slope), float((1.0 - offset) / slope)
