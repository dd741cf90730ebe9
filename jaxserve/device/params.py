"""A model's parameters in the places, and the layout, in which its step takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxserve.device.draft import DraftParams
from jaxserve.device.products import PANELS
from jaxserve.device.step_parts import StepParams
from pallas_kernels.linear import cpu_native


def fill_params(abstract: StepParams, values: dict[Any, Any]) -> StepParams:
    """`abstract` with arrays in the places of shapes.

    Args:
      values: nested pure dict of a whole model, keyed like `WeightSpec.path`. It is emptied, leaf by leaf, so that no
        matrix that has to be turned is there twice for longer than that takes.
    """
    filled: StepParams = jax.tree.map(lambda shape: shape, abstract)  # a copy
    turn = jax.jit(cpu_native.to_panels)
    layers = values.pop("layers", {})
    for layer, state in enumerate(filled.layers):
        nnx.replace_by_pure_dict(state, _laid_out(layers.pop(layer), nnx.to_pure_dict(state), turn))
    nnx.replace_by_pure_dict(filled.ends, _laid_out(values, nnx.to_pure_dict(filled.ends), turn))
    return filled


def fill_draft_params(
    abstract: DraftParams, values: dict[Any, Any] | None, target: StepParams
) -> DraftParams:
    """The same for what drafts.

    Args:
      values: a whole draft model's, or an exit's; None: it has nothing of its own. Emptied.
      target: parameters of the model that it drafts for, whose first layers it is unless it has its own.
    """
    first = target.first(len(abstract.layers))
    if abstract.exit is None:
        own = first if values is None else fill_params(StepParams(abstract.ends, abstract.layers), values)
        return DraftParams(own.ends, own.layers)
    assert values is not None
    exit_: nnx.State = jax.tree.map(lambda shape: shape, abstract.exit)  # a copy
    turn = jax.jit(cpu_native.to_panels)
    nnx.replace_by_pure_dict(exit_, _laid_out(values, nnx.to_pure_dict(exit_), turn))
    return DraftParams(first.ends, first.layers, exit_)


def _laid_out(
    values: dict[Any, Any], wanted: dict[Any, Any], turn: Callable[[jax.Array], jax.Array]
) -> dict[Any, Any]:
    """The same leaves, matrices as panels where these are wanted; `values` is emptied."""
    laid_out: dict[Any, Any] = {}
    for name in list(values):
        value = values.pop(name)
        if isinstance(value, dict):
            laid_out[name] = _laid_out(value, wanted[name], turn)
        elif name == "kernel" and PANELS in wanted:
            laid_out[PANELS] = jax.block_until_ready(turn(value))
        else:
            laid_out[name] = value
    return laid_out
