"""How matrices are applied: by XLA, or on a CPU in C++, and then how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxserve.models.layers import Linear, replace_linears
from jaxserve.models.quantization import Int8Linear
from pallas_kernels.linear import cpu_native
from pallas_kernels.paged_attention import Backend

# The name of a matrix in panels among a module's parameters; `fill_params` makes it from "kernel".
PANELS = "kernel_panels"


class PanelLinear(nnx.Module):
    """`Linear` with its matrix as `cpu_native.to_panels` turns it. [..., in] -> [..., out]."""

    def __init__(self, linear: Linear | Int8Linear):
        self.kernel_panels = nnx.Param(cpu_native.to_panels(linear.kernel[...]))
        self.use_bias = linear.use_bias
        if linear.use_bias:
            self.bias = linear.bias

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        [y_TO] = self.apply_all([self], x_TI)
        return y_TO

    @classmethod
    def apply_all(cls, maps: Sequence[Any], x_TI: jax.Array) -> tuple[jax.Array, ...]:
        """See `layers.apply_each`."""
        return tuple(
            y_TO + each.bias[...] if each.use_bias else y_TO
            for each, y_TO in zip(maps, cls._products(maps, x_TI), strict=True)
        )

    @staticmethod
    def _products(maps: Sequence[PanelLinear], x_TI: jax.Array) -> tuple[jax.Array, ...]:
        return cpu_native.project_panels(x_TI, [each.kernel_panels[...] for each in maps])


class Int8PanelLinear(PanelLinear):
    """The same of an `Int8Linear`."""

    def __init__(self, linear: Int8Linear):
        super().__init__(linear)
        self.kernel_scale = linear.kernel_scale

    @staticmethod
    def _products(maps: Sequence[Any], x_TI: jax.Array) -> tuple[jax.Array, ...]:
        matrices = [(each.kernel_panels[...], each.kernel_scale[...]) for each in maps]
        return cpu_native.project_int8_panels(x_TI, matrices)


def choose_products(model: Any, attention: Backend) -> Any:
    """`model` with C++ products in the place of XLA's where native code runs, which attention's backend shows.

    A layer's matrices become panels where their rows allow it. The output head stays as it is, since a tied one is the
    embedding as well. Models need not know.
    """
    return _choose(model, model.layers, attention)


def choose_exit_products(exit_: nnx.Module, attention: Backend) -> nnx.Module:
    """The same for an exit, whose head is its own and may become panels as well."""
    return _choose(exit_, [exit_], attention)


def _choose(module: Any, parts: Iterable[nnx.Module], attention: Backend) -> Any:
    if attention.name == "cpu-native":
        for kind, in_panels in ((Linear, PanelLinear), (Int8Linear, Int8PanelLinear)):
            replace_linears(parts, kind, partial(_turned, in_panels))
        for _, each in nnx.iter_modules(module):
            if hasattr(each, "project"):
                each.project = cpu_native.project
    return module


def _turned(in_panels: Callable[[Any], Any], linear: Any) -> Any:
    return in_panels(linear) if cpu_native.fits_panels(linear.kernel[...]) else linear
