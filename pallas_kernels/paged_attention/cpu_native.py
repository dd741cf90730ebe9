"""Paged attention on a CPU in compiled C++ (`cpu_native.h`), called by XLA programs through its foreign functions.

XLA's own products of the small matrices that decoding multiplies run on one core, and far below the memory's speed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.paged_attention.backends import Backend
from pallas_kernels.paged_attention.spec import AttentionSpec, DeviceFacts

_TARGETS = {"float32": "paged_attention_float32", "bfloat16": "paged_attention_bfloat16"}
_LANES, _MOST_HEAD_DIM, _MOST_GROUP = 8, 512, 64


def check(spec: AttentionSpec, device: DeviceFacts) -> None:
    """Build the code if need be.

    Raises:
      NotImplementedError: it can't run such calls, or not here; the text says why.
    """
    if device.platform != "cpu":
        raise NotImplementedError(f"cpu-native needs a CPU, this is a {device.platform}")
    if spec.dtype not in _TARGETS or spec.is_quantised:
        raise NotImplementedError(
            f"cpu-native takes float32 and bfloat16, queries and cache alike, not {spec.dtype} and {spec.kv_dtype}"
        )
    if spec.head_dim % _LANES or spec.head_dim > _MOST_HEAD_DIM or spec.group > _MOST_GROUP:
        raise NotImplementedError(
            f"cpu-native takes a head_dim of a multiple of {_LANES} up to {_MOST_HEAD_DIM} and up to {_MOST_GROUP} "
            f"query heads for each KV head, not {spec.head_dim} and {spec.group}"
        )
    library.load()


def ragged_paged_attention(
    q_THd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    block_tables_SB: jax.Array,
    seq_lens_S: jax.Array,
    cu_q_lens: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    backend: Backend,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """See `api.ragged_paged_attention`. Decode rows need no path of their own."""
    name = _TARGETS.get(str(q_THd.dtype))
    if name is None or k_cache_NKbd.dtype != q_THd.dtype:
        raise NotImplementedError(
            f"cpu-native takes no queries of {q_THd.dtype} over a {k_cache_NKbd.dtype} cache"
        )
    library.load()
    attend = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q_THd.shape, q_THd.dtype))
    return attend(
        q_THd,
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB,
        seq_lens_S,
        cu_q_lens,
        num_seqs.reshape(1),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        sliding_window=np.int64(sliding_window or 2**31 - 1),
    )


def paged_decode(
    q_SHd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    seq_lens_S: jax.Array,
    num_seqs: jax.Array,
    **call: Any,
) -> jax.Array:
    """See `api.paged_decode`: `call` is the rest of its arguments."""
    rows = jnp.arange(seq_lens_S.shape[0] + 1, dtype=jnp.int32)
    return ragged_paged_attention(
        q_SHd,
        k_cache_NKbd,
        v_cache_NKbd,
        seq_lens_S=seq_lens_S,
        cu_q_lens=jnp.minimum(rows, num_seqs),
        num_decodes=num_seqs,
        num_seqs=num_seqs,
        **call,
    )
