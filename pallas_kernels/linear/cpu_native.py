"""``x @ kernel.T`` on a CPU in C++ (`cpu_native.h`), called by XLA programs as a foreign function.

XLA's own products of 2 to 32 rows read the matrix at a third of the memory's speed, or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.native import library

PANEL = 16  # rows of a matrix that lie together, column by column

_TARGETS = {
    ("float32", "float32"): "linear_float32_float32",
    ("bfloat16", "bfloat16"): "linear_bfloat16_bfloat16",
    ("bfloat16", "float32"): "linear_bfloat16_float32",
}
_PANEL_TARGETS = {"float32": "linear_panels_float32", "bfloat16": "linear_panels_bfloat16"}
_INT8_TARGETS = {"float32": "linear_int8_panels_float32", "bfloat16": "linear_int8_panels_bfloat16"}


def project(x_TI: jax.Array, kernel_OI: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x @ kernel.T``, summed in float32: [..., O], in x's dtype unless `out_dtype` is given.

    A row's bits depend on that row and the kernel alone.

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


def to_panels(kernel_OI: jax.Array) -> jax.Array:
    """The matrix as `project_panels` wants it: [O / PANEL, I, PANEL]; of int8, as `project_int8_panels` does:
    [O / PANEL, I / 2, PANEL, 2].

    Raises:
      ValueError: `fits_panels` says no.
    """
    rows, columns = kernel_OI.shape
    if not fits_panels(kernel_OI):
        raise ValueError(f"a matrix of {rows} rows and {columns} columns makes no panels of {PANEL} rows")
    if kernel_OI.dtype == jnp.int8:
        return kernel_OI.reshape(rows // PANEL, PANEL, columns // 2, 2).swapaxes(1, 2)
    return kernel_OI.reshape(rows // PANEL, PANEL, columns).swapaxes(1, 2)


def fits_panels(kernel_OI: Any) -> bool:
    """Whether a matrix (or one that has only a shape and a dtype) is whole panels."""
    rows, columns = kernel_OI.shape
    return rows % PANEL == 0 and (kernel_OI.dtype != jnp.int8 or columns % 2 == 0)


def project_panels(x_TI: jax.Array, kernels_PIR: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """As `project`, of matrices that `to_panels` has turned beforehand: [..., O] for each, in x's dtype.

    One call for all of them keeps every thread busy to its end; several at once disturb each other.

    Raises:
      NotImplementedError: other dtypes, or the library can't be built here.
    """
    dtype = x_TI.dtype
    if str(dtype) not in _PANEL_TARGETS or any(kernel.dtype != dtype for kernel in kernels_PIR):
        kinds = ", ".join(str(kernel.dtype) for kernel in kernels_PIR)
        raise NotImplementedError(f"no product of {dtype} and panels of {kinds}")
    library.load()
    shapes = [(*x_TI.shape[:-1], kernel.shape[0] * PANEL) for kernel in kernels_PIR]
    call = jax.ffi.ffi_call(
        _PANEL_TARGETS[str(dtype)], tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    )
    return tuple(call(x_TI, *kernels_PIR))


def project_int8_panels(
    x_TI: jax.Array, kernels_PI: Sequence[tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, ...]:
    """``x @ kernel.T`` with int8 matrices: [..., O] for each, in x's dtype.

    Each token is rounded to int8 with the scale that maps its largest magnitude to 127 (to the nearest, ties to
    even), and the products of integers are summed exactly. A token that is not finite gives nothing finite.

    Args:
      x_TI: float32 or bfloat16.
      kernels_PI: matrices as `to_panels` turns them, and the scales of their rows, float32 [O].

    Raises:
      NotImplementedError: another dtype, or the library can't be built here.
    """
    dtype = x_TI.dtype
    if str(dtype) not in _INT8_TARGETS:
        raise NotImplementedError(f"no product of {dtype} and panels of int8")
    library.load()
    shapes = [(*x_TI.shape[:-1], scale_O.shape[0]) for _, scale_O in kernels_PI]
    call = jax.ffi.ffi_call(
        _INT8_TARGETS[str(dtype)], tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    )
    return tuple(call(x_TI, *(array for pair in kernels_PI for array in pair)))
