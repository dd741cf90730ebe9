"""Causal attention over one sequence held whole: the plainest `attend` there is, to judge models without a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dense_attend(
    layer: int, q_THd: jax.Array, k_TKd: jax.Array, v_TKd: jax.Array, kv_cache: Any
) -> tuple[jax.Array, Any]:
    """float32 softmax(q k^T / sqrt(d)) v with the future masked; `kv_cache` passes through unused."""
    tokens, heads, head_dim = q_THd.shape
    kv_heads = k_TKd.shape[1]
    q_TKGd = q_THd.reshape(tokens, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,skd->kgts", q_TKGd, k_TKd.astype(jnp.float32), precision=exact)
    visible = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", weights, v_TKd.astype(jnp.float32), precision=exact)
    return out.reshape(tokens, heads, head_dim).astype(q_THd.dtype), kv_cache
