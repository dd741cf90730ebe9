"""How float matrices are applied."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxserve.models.layers import Product, project
from pallas_kernels.linear import cpu_native
from pallas_kernels.paged_attention import Backend


def choose_product(attention: Backend, *, deterministic: bool) -> Product:
    """XLA's own, but for few tokens where native code runs, which attention's backend shows.

    Not in deterministic mode: the two round differently, and a token's bits must not depend on how many there are.
    """
    return _native_for_few_tokens if attention.name == "cpu-native" and not deterministic else project


def _native_for_few_tokens(
    x_TI: jax.Array, kernel_OI: jax.Array, *, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    if cpu_native.is_faster(math.prod(x_TI.shape[:-1]), x_TI.dtype):
        return cpu_native.project(x_TI, kernel_OI, out_dtype=out_dtype)
    return project(x_TI, kernel_OI, out_dtype=out_dtype)
