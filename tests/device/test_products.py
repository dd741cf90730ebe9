"""Linear maps whose matrices are panels give what those with plain matrices give."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.device.products import Int8PanelLinear, PanelLinear
from jaxserve.models.layers import Linear, apply_each
from jaxserve.models.quantization import Int8Linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_int8_panels_give_the_bits_of_int8_matrices(dtype: str, use_bias: bool) -> None:
    rng = np.random.default_rng(0)
    plain = []
    for out_features in (16, 48):
        bias = nnx.Param(jnp.asarray(rng.standard_normal(out_features), dtype)) if use_bias else None
        linear = Int8Linear(40, out_features, bias=bias)
        linear.kernel[...] = jnp.asarray(rng.integers(-127, 128, (out_features, 40)), jnp.int8)
        linear.kernel_scale[...] = jnp.asarray(rng.random(out_features), jnp.float32)
        plain.append(linear)
    x = jnp.asarray(rng.standard_normal((2, 3, 40)), dtype)
    for y, wanted in zip(apply_each([*map(Int8PanelLinear, plain)], x), apply_each(plain, x), strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted), strict=True)


@pytest.mark.parametrize("use_bias", [False, True])
def test_panels_give_what_matrices_give(use_bias: bool) -> None:
    plain = [
        Linear(40, 32, use_bias=use_bias, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(i)) for i in range(2)
    ]
    if use_bias:
        plain[1].bias[...] = jnp.arange(32.0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 40)), jnp.float32)
    for y, wanted in zip(apply_each([*map(PanelLinear, plain)], x), apply_each(plain, x), strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(wanted), atol=1e-5)
