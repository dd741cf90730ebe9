"""Rotary embedding against formulas written out one dimension at a time, and against what it must mean."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import RopeConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.rope import apply_rope, rope_cos_sin, rope_frequencies

CONTEXT = 8192
HEAD_DIM = 128
LLAMA31 = RopeConfig(
    rope_type="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=CONTEXT,
)
YARN = RopeConfig(rope_type="yarn", theta=10000.0, factor=16.0, original_max_position_embeddings=4096)


def _wavelengths(theta: float) -> list[float]:
    return [2 * math.pi * theta ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def _frequencies(rope: RopeConfig) -> np.ndarray:
    return rope_frequencies(rope, HEAD_DIM, CONTEXT)[0]


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
def test_default_frequencies(theta: float) -> None:
    expected = [2 * math.pi / w for w in _wavelengths(theta)]
    np.testing.assert_allclose(_frequencies(RopeConfig(theta=theta)), expected, rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_linear_is_default_at_positions_divided(factor: float) -> None:
    default = _frequencies(RopeConfig(theta=10000.0))
    linear = _frequencies(RopeConfig(rope_type="linear", theta=10000.0, factor=factor))
    np.testing.assert_allclose(linear * factor, default, rtol=1e-6)


def test_llama3_frequencies() -> None:
    expected = []
    for wavelength in _wavelengths(500000.0):
        frequency = 2 * math.pi / wavelength
        if wavelength > CONTEXT / 1.0:
            frequency /= 8.0
        elif wavelength > CONTEXT / 4.0:
            kept = (CONTEXT / wavelength - 1.0) / 3.0
            frequency = (1 - kept) * frequency / 8.0 + kept * frequency
        expected.append(frequency)
    frequencies = _frequencies(LLAMA31)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert (np.diff(frequencies) < 0).all()


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (8.0, 2.0)])
def test_yarn_frequencies(truncate: bool, betas: tuple[float, float]) -> None:
    # Where a dimension turns `beta` times within the original context: solve 4096 / wavelength = beta for it.
    first, last = (HEAD_DIM / 2 * math.log(4096 / (beta * 2 * math.pi), 10000.0) for beta in betas)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    expected = []
    for i, wavelength in enumerate(_wavelengths(10000.0)):
        stretched = min(max((i - first) / (last - first), 0.0), 1.0)
        frequency = 2 * math.pi / wavelength
        expected.append(frequency * (1 - stretched) + frequency / 16.0 * stretched)
    rope = dataclasses.replace(YARN, beta_fast=betas[0], beta_slow=betas[1], truncate=truncate)
    np.testing.assert_allclose(_frequencies(rope), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({}, 0.1 * math.log(16) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.7, "mscale_all_dim": 1.2}, (0.07 * math.log(16) + 1) / (0.12 * math.log(16) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(16) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(settings_: dict[str, float], expected: float) -> None:
    rope = RopeConfig(
        **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096} | settings_
    )
    assert rope_frequencies(rope, HEAD_DIM, CONTEXT)[1] == pytest.approx(expected)


@pytest.mark.parametrize("rope", [RopeConfig(), RopeConfig(rope_type="linear", factor=2.0), LLAMA31])
def test_only_yarn_scales_attention(rope: RopeConfig) -> None:
    assert rope_frequencies(rope, HEAD_DIM, CONTEXT)[1] == 1.0


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_original_context_defaults_to_the_models(rope_type: str) -> None:
    named = RopeConfig(rope_type=rope_type, factor=4.0, original_max_position_embeddings=2048)
    unnamed = RopeConfig(rope_type=rope_type, factor=4.0)
    np.testing.assert_array_equal(
        rope_frequencies(named, 64, 99999)[0], rope_frequencies(unnamed, 64, 2048)[0]
    )


@pytest.mark.parametrize(
    ("rope", "head_dim", "fault"),
    [
        (RopeConfig(rope_type="dynamic"), 64, "dynamic"),  # type: ignore[arg-type]
        (RopeConfig(rope_type="linear", factor=0.0), 64, "factor"),
        (RopeConfig(rope_type="yarn", factor=-2.0), 64, "factor"),
        (RopeConfig(rope_type="llama3", factor=2.0, low_freq_factor=4.0), 64, "low_freq_factor"),
        (RopeConfig(), 63, "head_dim"),
    ],
)
def test_unusable_settings_are_refused_by_name(rope: RopeConfig, head_dim: int, fault: str) -> None:
    with pytest.raises(CheckpointError, match=fault) as caught:
        rope_frequencies(rope, head_dim, CONTEXT)
    assert "\n" not in str(caught.value)


def test_angles_stay_exact_far_into_a_long_context() -> None:
    """cos and sin of large float32 angles must be reduced properly, not only near zero."""
    positions_T = np.array([0, 1, 8191, 65535, 131071], np.int32)
    frequencies = _frequencies(LLAMA31)
    cos_Td, sin_Td = rope_cos_sin(jnp.asarray(positions_T), frequencies, 1.0)
    angles_Td = (positions_T[:, None].astype(np.float32) * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos_Td, np.cos(angles_Td), atol=1e-5)
    np.testing.assert_allclose(sin_Td, np.sin(angles_Td), atol=1e-5)


@settings(max_examples=25)
@given(position=st.integers(0, 8191), seed=st.integers(0, 2**32 - 1), factor=st.sampled_from([1.0, 1.3]))
def test_turning_is_complex_multiplication(position: int, seed: int, factor: float) -> None:
    """Dimensions i and i + d/2 are the real and imaginary part of one number."""
    frequencies = rope_frequencies(RopeConfig(), 16, CONTEXT)[0]
    x_THd = np.random.default_rng(seed).standard_normal((1, 3, 16)).astype(np.float32)
    turned = apply_rope(jnp.asarray(x_THd), *rope_cos_sin(jnp.array([position]), frequencies, factor))
    angles_d = (np.float32(position) * frequencies).astype(np.float64)
    expected = (x_THd[..., :8] + 1j * x_THd[..., 8:]) * np.exp(1j * angles_d) * factor
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


def test_scores_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q_d, k_d = rng.standard_normal((2, 64)).astype(np.float32)
    frequencies = rope_frequencies(LLAMA31, 64, CONTEXT)[0]

    def score(q_position: int, k_position: int) -> float:
        cos_sin = rope_cos_sin(jnp.array([q_position, k_position]), frequencies, 1.0)
        q_THd, k_THd = apply_rope(jnp.stack([q_d, k_d])[:, None, :], *cos_sin)
        return float(q_THd[0] @ k_THd[0])

    near = score(12, 5)
    assert score(1012, 1005) == pytest.approx(near, abs=1e-2)
    assert max(abs(score(12, other) - near) for other in (0, 8, 11)) > 0.5


def test_bfloat16_is_turned_in_float32() -> None:
    x_THd = jnp.asarray(np.random.default_rng(1).standard_normal((5, 2, 16)), jnp.bfloat16)
    cos_sin = rope_cos_sin(jnp.arange(5) + 4000, rope_frequencies(RopeConfig(), 16, CONTEXT)[0], 1.0)
    turned = apply_rope(x_THd, *cos_sin)
    assert turned.dtype == jnp.bfloat16
    exact = apply_rope(x_THd.astype(jnp.float32), *cos_sin)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))
