"""``x @ kernel.T`` of few tokens on a CPU in C++ (`cpu_native.h`), called by XLA programs as a foreign function.

XLA's own products of 2 to 32 rows read the matrix at a third of the memory's speed, or less.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import library

_TARGETS = {
    ("float32", "float32"): "linear_float32_float32",
    ("bfloat16", "bfloat16"): "linear_bfloat16_bfloat16",
    ("bfloat16", "float32"): "linear_bfloat16_float32",
}
# From there on XLA's own is as fast or faster, as measured on 2 cores of Zen 3.
_MOST_TOKENS = {"float32": 32, "bfloat16": 8}


def is_faster(num_tokens: int, dtype: jnp.dtype) -> bool:
    """Whether `project` is the better way for so many rows of `x`."""
    return num_tokens <= _MOST_TOKENS.get(str(dtype), 0)


def project(x_TI: jax.Array, kernel_OI: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x @ kernel.T``, summed in float32: [..., O], in x's dtype unless `out_dtype` is given.

    Args:
      x_TI, kernel_OI: both float32, or both bfloat16.

    Raises:
      NotImplementedError: other dtypes, or the library can't be built here.
    """
    dtypes = str(x_TI.dtype), str(jnp.dtype(out_dtype or x_TI.dtype))
    if x_TI.dtype != kernel_OI.dtype or dtypes not in _TARGETS:
        raise NotImplementedError(f"no product of {x_TI.dtype} and {kernel_OI.dtype} as {dtypes[1]}")
    library.load()
    shape = (*x_TI.shape[:-1], kernel_OI.shape[0])
    call = jax.ffi.ffi_call(_TARGETS[dtypes], jax.ShapeDtypeStruct(shape, jnp.dtype(dtypes[1])))
    return call(x_TI, kernel_OI)
