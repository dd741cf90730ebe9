"""An exit: what takes the place of a model's later layers where the first ones draft (`device.draft`).

It guesses the final hidden state of a token from two things: what the first layers make of that token, and the final
hidden state of the token before it, which the model itself, or an earlier guess, has given (as in EAGLE, arXiv
2401.15077). A small head gives the guess's logits, of frequent tokens alone (as in FR-Spec, arXiv 2502.14856): all
other tokens are never proposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.layers import GatedMLP, Linear, RMSNorm
from jaxserve.models.registry import WeightSpec

TOKEN_IDS = ("token_ids",)  # the one leaf that is no float


@dataclass(frozen=True, slots=True)
class ExitShape:
    """An exit without its parameters.

    Attributes:
      hidden_size, rms_norm_eps: the model's.
      inner_size: of its MLP.
      num_tokens: how many tokens it knows.
    """

    hidden_size: int
    inner_size: int
    num_tokens: int
    rms_norm_eps: float


class Exit(nnx.Module):
    """See the module's text. Under `nnx.eval_shape` building it allocates nothing."""

    def __init__(self, shape: ExitShape, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = shape.hidden_size
        self.norm_early = RMSNorm(width, eps=shape.rms_norm_eps, dtype=dtype)
        self.norm_before = RMSNorm(width, eps=shape.rms_norm_eps, dtype=dtype)
        self.skip = Linear(2 * width, width, use_bias=True, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(
            2 * width, shape.inner_size, hidden_act="silu", use_bias=True, dtype=dtype, rngs=rngs, out=width
        )
        self.head = Linear(width, shape.num_tokens, use_bias=False, dtype=dtype, rngs=rngs)
        self.token_ids = nnx.Param(jnp.arange(shape.num_tokens, dtype=jnp.int32))

    def guess(self, early_SD: jax.Array, before_SD: jax.Array) -> jax.Array:
        """The final hidden states, normed.

        Args:
          early_SD: hidden states of S tokens behind the first layers.
          before_SD: final hidden states, normed, of the tokens before them, or guesses of these.
        """
        both = jnp.concatenate([self.norm_early(early_SD), self.norm_before(before_SD)], axis=-1)
        return self.skip(both) + self.mlp(both)

    def compute_logits(self, guess_SD: jax.Array) -> jax.Array:
        """Float32 [S, num_tokens], of `token_ids`."""
        return self.head(guess_SD).astype(jnp.float32)


def exit_specs(shape: ExitShape) -> list[WeightSpec]:
    """Every parameter. `token_ids` is int32, ascending; the others are floats."""
    width, inner = shape.hidden_size, shape.inner_size
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        TOKEN_IDS: (shape.num_tokens,),
        ("norm_early", "scale"): (width,),
        ("norm_before", "scale"): (width,),
        ("skip", "kernel"): (width, 2 * width),
        ("skip", "bias"): (width,),
        ("mlp", "gate_proj", "kernel"): (inner, 2 * width),
        ("mlp", "gate_proj", "bias"): (inner,),
        ("mlp", "up_proj", "kernel"): (inner, 2 * width),
        ("mlp", "up_proj", "bias"): (inner,),
        ("mlp", "down_proj", "kernel"): (width, inner),
        ("mlp", "down_proj", "bias"): (width,),
        ("head", "kernel"): (shape.num_tokens, width),
    }
    return [WeightSpec(path, ".".join(path), "", each) for path, each in shapes.items()]


def exit_bytes(specs: Iterable[WeightSpec], itemsize: int) -> int:
    """What they take on the device.

    Args:
      itemsize: bytes of a float.
    """
    return sum(math.prod(spec.shape) * (4 if spec.path == TOKEN_IDS else itemsize) for spec in specs)
