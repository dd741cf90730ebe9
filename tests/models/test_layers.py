"""The shared layers against float64 numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.layers import Embedding, GatedMLP, Linear, RMSNorm, activation, project


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_keeps_kernels_as_out_by_in(use_bias: bool) -> None:
    layer = Linear(6, 10, use_bias=use_bias, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    assert layer.kernel.shape == (10, 6)
    expected = _normal(4, 6).astype(np.float64) @ np.asarray(layer.kernel[...], np.float64).T
    if use_bias:
        layer.bias[...] = jnp.arange(10.0)
        expected += np.arange(10.0)
    np.testing.assert_allclose(layer(jnp.asarray(_normal(4, 6))), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(jnp.float32, jax.lax.Precision.HIGHEST), (jnp.bfloat16, jax.lax.Precision.DEFAULT)],
)
def test_precision_is_asked_for_by_name(dtype: jnp.dtype, precision: jax.lax.Precision) -> None:
    jaxpr = jax.make_jaxpr(project)(jnp.zeros((2, 3), dtype), jnp.zeros((5, 3), dtype))
    (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert set(dot.params["precision"]) == {precision}


def test_float32_output_of_bfloat16_inputs_is_not_rounded() -> None:
    x, kernel = jnp.asarray(_normal(3, 64), jnp.bfloat16), jnp.asarray(_normal(7, 64, seed=1), jnp.bfloat16)
    out = project(x, kernel, out_dtype=jnp.dtype(jnp.float32))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(scale: float) -> None:
    norm = RMSNorm(32, eps=1e-5, dtype=jnp.dtype(jnp.float32))
    norm.scale[...] = jnp.asarray(_normal(32, seed=1))
    x = _normal(5, 32) * np.float32(scale)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * _normal(32, seed=1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_in_bfloat16_rounds_once() -> None:
    """Squares of large bfloat16 values summed in bfloat16 would lose whole per cents."""
    norm = RMSNorm(4096, eps=1e-5, dtype=jnp.dtype(jnp.bfloat16))
    x = jnp.asarray(_normal(3, 4096) * 300, jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)


def test_embedding_survives_padding_ids() -> None:
    table = Embedding(11, 4, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    rows = table(jnp.array([3, -1, 11, 2**31 - 1]))
    np.testing.assert_array_equal(rows[0], table.embedding[...][3])
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("use_bias", [False, True])
def test_gated_mlp(use_bias: bool) -> None:
    mlp = GatedMLP(
        6, 10, hidden_act="silu", use_bias=use_bias, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)
    )
    if use_bias:
        for i, layer in enumerate((mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            layer.bias[...] = jnp.asarray(_normal(*layer.bias.shape, seed=i))

    def affine(layer: Linear, x: np.ndarray) -> np.ndarray:
        bias = np.asarray(layer.bias[...]) if use_bias else 0.0
        return x @ np.asarray(layer.kernel[...], np.float64).T + bias

    x = _normal(4, 6)
    gate = affine(mlp.gate_proj, x)
    expected = affine(mlp.down_proj, gate / (1 + np.exp(-gate)) * affine(mlp.up_proj, x))
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, atol=1e-5)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_act 'relu6'.*silu"):
        activation("relu6")
