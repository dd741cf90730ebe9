"""The pieces every decoder family shares: linear maps, embedding, RMS norm, gated MLP.

Matrices are kept as [out, in] (Hugging Face's layout) and applied by contracting the last axes, so loading
never transposes. Norms compute in float32 whatever the weights' dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import CheckpointError

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


_SUM_COLUMNS = (
    16  # equal columns of a product that sums rows; a single one would make it a matrix-vector product
)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation a Hugging Face config calls `name`.

    Raises:
      CheckpointError: no such activation here; the text lists the known ones.
    """
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"unsupported hidden_act {name!r}; supported: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


class Product(Protocol):
    """`project`, or another way to do the same."""

    def __call__(
        self, x_TI: jax.Array, kernel_OI: jax.Array, *, out_dtype: jnp.dtype | None = None
    ) -> jax.Array: ...


def project(x_TI: jax.Array, kernel_OI: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``x @ kernel.T`` -> [..., O], in x's dtype unless `out_dtype` is given.

    float32 asks for full precision by name: the default lets GPUs round the inputs to TF32 (about 1e-3
    relative error), which nobody who chose float32 expects.
    """
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contract_last = (((x_TI.ndim - 1,), (kernel_OI.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(
        x_TI, kernel_OI, contract_last, precision=precision, preferred_element_type=out_dtype
    )


def _scaled_normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype)


class Linear(nnx.Module):
    """Affine map [..., in] -> [..., out]. `kernel` is [out, in]; `bias`, if asked for, is [out]."""

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(_scaled_normal(rngs, (out_features, in_features), dtype, in_features**-0.5))
        self.project: Product = project
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        y_TO = self.project(x_TI, self.kernel[...])
        return y_TO + self.bias[...] if self.use_bias else y_TO


def apply_each(maps: Sequence[Any], x_TI: jax.Array) -> tuple[jax.Array, ...]:
    """Several linear maps of one input; together, if they are of one kind that has `apply_all`."""
    kind = type(maps[0])
    if hasattr(kind, "apply_all") and all(type(each) is kind for each in maps):
        return kind.apply_all(maps, x_TI)
    return tuple(each(x_TI) for each in maps)


def replace_linears(parts: Iterable[nnx.Module], kind: type, replacement: Callable[[Any], Any]) -> None:
    """Put what `replacement` makes of it in the place of each linear map of that kind inside of `parts`; for abstract
    modules."""
    for part in parts:
        for _, module in list(nnx.iter_modules(part)):
            for name, child in list(vars(module).items()):
                if isinstance(child, kind):
                    setattr(module, name, replacement(child))


class Embedding(nnx.Module):
    """Token table; `embedding` is [V, D]."""

    def __init__(self, vocab_size: int, features: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = nnx.Param(_scaled_normal(rngs, (vocab_size, features), dtype, 0.02))

    def __call__(self, token_ids_T: jax.Array) -> jax.Array:
        """int [T] -> [T, D]. An id outside the vocabulary takes the nearest row: padding may hold anything."""
        return jnp.take(self.embedding[...], token_ids_T, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 and returned in x's dtype; `scale` is [D].

    Args:
      deterministic: a row's bits do not depend on T (at least 2). XLA's CPU backend chooses by the size of an array
        how it sums rows, but computes each row of a matrix product alike: so the squares are summed by one.
    """

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype, deterministic: bool = False):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps
        self.deterministic = deterministic

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        wide_TD = x_TD.astype(jnp.float32)
        if self.deterministic:
            width = x_TD.shape[-1]
            mean_T1 = project(jnp.square(wide_TD), jnp.ones((_SUM_COLUMNS, width)))[:, :1] / width
        else:
            mean_T1 = jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True)
        inverse_rms_T1 = jax.lax.rsqrt(mean_T1 + self.eps)
        return (wide_TD * inverse_rms_T1 * self.scale[...].astype(jnp.float32)).astype(x_TD.dtype)


class GatedMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))``: SwiGLU with silu (arXiv 2002.05202). [T, D] -> [T, D], or [T, out]."""

    def __init__(
        self,
        features: int,
        inner_features: int,
        *,
        hidden_act: str,
        use_bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        out: int | None = None,
    ):
        self.gate_proj = Linear(features, inner_features, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(features, inner_features, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner_features, out or features, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.activation = activation(hidden_act)

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        gate_TI, up_TI = apply_each((self.gate_proj, self.up_proj), x_TD)
        return self.down_proj(self.activation(gate_TI) * up_TI)
