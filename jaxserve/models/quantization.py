"""Dynamic int8: a layer's matrices as int8 with a scale for each output channel, activations rounded token by token.

The product of the two is an integer, summed in int32, so it is exact whatever the order: a row's result can't depend
on the rows beside it. Where there is no C++ (`device/products.py`), int8 x int8 -> int32 with matrices [out, in] is the
fastest of XLA's forms on a CPU; converting matrices to floats inside the step is slower than float32 matrices.

Norms, biases, the token embedding and the output head stay in the model's dtype.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import Quantization
from jaxserve.models.layers import Linear, replace_linears
from jaxserve.models.registry import WeightSpec

_LARGEST = 127  # symmetric: -128 is not used


def quantise_rows(x_RI: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x ~ int8 * scale``, each row with the scale that maps its largest magnitude to 127.

    Args:
      x_RI: floats [..., I]. A row with NaN or infinity gets a scale that is not finite.

    Returns:
      (int8 [..., I], float32 scales [..., 1]); rows of zeros have scale 0.
    """
    wide_RI = x_RI.astype(jnp.float32)
    scale_R1 = jnp.max(jnp.abs(wide_RI), axis=-1, keepdims=True) / _LARGEST
    divisor_R1 = jnp.where(scale_R1 > 0, scale_R1, 1)
    rounded_RI = jnp.clip(jnp.round(wide_RI / divisor_R1), -_LARGEST, _LARGEST)
    return rounded_RI.astype(jnp.int8), scale_R1


class Int8Linear(nnx.Module):
    """`Linear` with an int8 `kernel` [out, in] and a float32 `kernel_scale` [out]; `in` at most 133,000 (int32)."""

    def __init__(self, in_features: int, out_features: int, *, bias: nnx.Param | None):
        self.kernel = nnx.Param(jnp.zeros((out_features, in_features), jnp.int8))
        self.kernel_scale = nnx.Param(jnp.ones((out_features,), jnp.float32))
        self.use_bias = bias is not None
        if bias is not None:
            self.bias = bias

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        """[..., in] -> [..., out], in x's dtype."""
        rounded_TI, scale_T1 = quantise_rows(x_TI)
        contract_last = (((x_TI.ndim - 1,), (1,)), ((), ()))
        sums_TO = jax.lax.dot_general(
            rounded_TI, self.kernel[...], contract_last, preferred_element_type=jnp.dtype(jnp.int32)
        )
        y_TO = (sums_TO.astype(jnp.float32) * (scale_T1 * self.kernel_scale[...])).astype(x_TI.dtype)
        return y_TO + self.bias[...] if self.use_bias else y_TO


def quantise_modules(model: Any, quantization: Quantization | None) -> Any:
    """`model` with an `Int8Linear` for each `Linear` of its layers, so that models need not know; for abstract ones."""

    def quantised(linear: Linear) -> Int8Linear:
        out_features, in_features = linear.kernel.shape
        return Int8Linear(in_features, out_features, bias=linear.bias if linear.use_bias else None)

    if quantization is not None:
        replace_linears(model.layers, Linear, quantised)
    return model


def is_quantised(spec: WeightSpec, quantization: Quantization | None) -> bool:
    """Whether a parameter is one of the matrices that `quantise_modules` expects as int8."""
    return quantization is not None and spec.path[0] == "layers" and spec.path[-1] == "kernel"


def spec_bytes(spec: WeightSpec, itemsize: int, quantization: Quantization | None) -> int:
    """What a parameter takes on the device, with its scales; `itemsize` is that of the model's dtype."""
    entries = math.prod(spec.shape)
    return (
        entries + 4 * math.prod(scale_spec(spec).shape)
        if is_quantised(spec, quantization)
        else entries * itemsize
    )


def scale_spec(spec: WeightSpec) -> WeightSpec:
    """Where the scales of a quantised matrix live. Its names in files are the matrix's: they are made from it."""
    path = (*spec.path[:-1], f"{spec.path[-1]}_scale")
    return WeightSpec(path, spec.hf_name, spec.gguf_name, spec.shape[:1], optional=True)
