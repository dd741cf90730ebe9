"""A step cut into parts: before its layers, each layer, and after them.

Where launching a program is cheap next to running it (on a CPU), each part is a program of its own, and all layers of
one kind share theirs: a model of 30 layers then compiles, loads and takes memory like one of a single layer. What
comes after the layers is cut where the number of tokens stops to matter, so that shapes share those parts as well.
Elsewhere the parts are traced into one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxserve.config import ModelConfig, Quantization
from jaxserve.models.quantization import quantise_modules
from jaxserve.models.registry import get_family


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepParams:
    """A model's parameters as parts take them.

    Attributes:
      ends: NNX state of the model without its layers.
      layers: NNX state of each.
    """

    ends: nnx.State
    layers: tuple[nnx.State, ...]

    def first(self, num_layers: int) -> StepParams:
        """Those of the first layers, with the same ends."""
        return StepParams(self.ends, self.layers[:num_layers])


@dataclass(frozen=True)
class StepModel:
    """A model without its parameters. Hashable.

    Attributes:
      ends: the model without its layers.
      layers: each of them.
      kinds: a number for each layer; those with equal ones do the same to other parameters of the same shapes.
      num_shared_arrays: see `models.registry.ModelFamily`.
    """

    ends: nnx.GraphDef
    layers: tuple[nnx.GraphDef, ...]
    kinds: tuple[int, ...]
    num_shared_arrays: int

    def first(self, num_layers: int) -> StepModel:
        """The first layers, with the same ends."""
        return dataclasses.replace(self, layers=self.layers[:num_layers], kinds=self.kinds[:num_layers])


@dataclass(frozen=True)
class StepParts:
    """The parts as functions, or as programs that take the place of these functions; see `device.step`.

    Attributes:
      begin: (ends, last_token_ids_R, packed) -> (batch, x_TD, shared).
      layers: (layer, cache of one layer, x_TD, shared, batch) -> (cache, x_TD), for each.
      select: (ends, x_TD, batch) -> (hidden_SD, hidden_PD, targets_P).
      sample: (ends, sampling state, last_token_ids_R, hidden_SD, sampling rows, flags, allowed_SW)
        -> (sampling state, last_token_ids_R, sampled); knows S alone.
      score: (ends, hidden_PD, targets_P, flags) -> logprobs; knows P alone.
    """

    begin: Callable[..., Any]
    layers: tuple[Callable[..., Any], ...]
    select: Callable[..., Any]
    sample: Callable[..., Any]
    score: Callable[..., Any]


def split_model(
    model: ModelConfig,
    *,
    dtype: Any,
    deterministic: bool = False,
    quantization: Quantization | None = None,
    change: Callable[[Any], Any] = lambda model: model,
) -> tuple[StepModel, StepParams]:
    """The model in parts, with `jax.ShapeDtypeStruct` for parameters. Allocates nothing.

    Args:
      change: what else is done to an abstract model, such as `choose_products`.

    Raises:
      CheckpointError: the configuration is none that its family can build.
    """

    def abstract(config: ModelConfig) -> Any:
        build = get_family(config.architecture).build

        def make() -> Any:
            whole = build(config, dtype=dtype, rngs=nnx.Rngs(0), deterministic=deterministic)
            return change(quantise_modules(whole, quantization))

        return nnx.eval_shape(make)

    bare = abstract(dataclasses.replace(model, num_layers=0))
    ends, ends_state = nnx.split(bare)
    layers = [nnx.split(layer) for layer in abstract(model).layers]
    graphdefs, states = tuple(graphdef for graphdef, _ in layers), tuple(state for _, state in layers)
    numbers: dict[Any, int] = {}
    kinds = tuple(numbers.setdefault((graphdef, _shapes(state)), len(numbers)) for graphdef, state in layers)
    return StepModel(ends, graphdefs, kinds, bare.num_shared_arrays), StepParams(ends_state, states)


def _shapes(tree: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
