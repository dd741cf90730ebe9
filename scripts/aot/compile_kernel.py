"""Compiles one `KernelCase`; runs in a process of its own, because an over-sized kernel aborts it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.device.targets import TARGETS
from pallas_kernels.paged_attention import (
    AttentionSpec,
    paged_decode,
    ragged_paged_attention,
    resolve_backend,
)
from scripts.aot.cases import HEADS, KernelCase
from scripts.aot.deviceless import Compiled, compile_for

_TOKENS, _SEQS, _CONTEXT = 2048, 64, 8192
_WINDOW, _SOFT_CAP = 4096, 50.0  # Gemma 2's


def compile_kernel(case: KernelCase) -> Compiled:
    """Compile the call.

    Raises:
      NotImplementedError: the backend refuses it.
    """
    target, heads = TARGETS[case.target], HEADS[case.model]
    spec = AttentionSpec(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, case.block_size, case.dtype, case.kv_dtype
    )
    attend = partial(
        paged_decode if case.function == "decode" else ragged_paged_attention,
        scale=heads.head_dim**-0.5,
        backend=resolve_backend(case.backend, spec=spec, device=target.facts),
        sliding_window=_WINDOW if case.windowed else None,
        soft_cap=_SOFT_CAP if case.windowed else None,
    )

    def call(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, named: dict[str, jax.Array]) -> jax.Array:
        return attend(q, k_cache, v_cache, **named)

    return compile_for(target, call, _arguments(case, spec))


def _arguments(case: KernelCase, spec: AttentionSpec) -> tuple[Any, ...]:
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    width = _CONTEXT // spec.block_size
    cache = jax.ShapeDtypeStruct(
        (_SEQS * width + 1, spec.num_kv_heads, spec.block_size, spec.head_dim), spec.kv_dtype
    )
    named = {"block_tables_SB": ints(_SEQS, width), "seq_lens_S": ints(_SEQS), "num_seqs": ints()}
    if case.function != "decode":
        named |= {"cu_q_lens": ints(_SEQS + 1), "num_decodes": ints()}
    if spec.is_quantised:
        by_block = jax.ShapeDtypeStruct((cache.shape[0], 1), jnp.float32)
        named |= {"k_scale": by_block, "v_scale": by_block}
    rows = _SEQS if case.function == "decode" else _TOKENS
    q = jax.ShapeDtypeStruct((rows, spec.num_heads, spec.head_dim), spec.dtype)
    return q, cache, cache, named
