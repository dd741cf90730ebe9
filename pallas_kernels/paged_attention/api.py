"""The one interface to paged attention; callers never learn which backend runs.

Shape letters: T tokens of the packed batch, S sequences, B block-table width, N blocks in the cache,
b tokens a block holds, H query heads, K KV heads, d head size. None of them may be 0.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.backends import Backend, module_of

_QUERIES = ("float32", "bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
_MOST_SOFT_CAP = 10_000  # Mosaic's scores are rounded to 2e-7 of the cap


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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of one packed batch that mixes decode rows and prefill chunks.

    The keys and values of the batch's own tokens must already stand in the cache, which is only read: nothing here
    aliases or copies it. Query head h reads KV head h // (H / K). Sequence s owns the query rows
    cu_q_lens[s] .. cu_q_lens[s + 1]; they are its last tokens, so query row i of n stands at position
    seq_lens[s] - n + i and sees every position up to its own.

    Args:
      q_THd: float32, bfloat16 or float16; queries, packed. Rows past cu_q_lens[num_seqs] are padding; what they
        yield is unspecified (finite).
      k_cache_NKbd, v_cache_NKbd: one dtype, that of q, or int8, float8_e4m3fn or float8_e5m2 together with scales.
        Slots that no sequence's tokens fill may hold anything, NaN included.
      block_tables_SB: int32; entry j of row s holds positions j * b .. (j + 1) * b of sequence s. Entries past the
        sequence's length must be valid block ids (0, the sink, will do).
      seq_lens_S: int32; tokens of each sequence in the cache, this batch's included. 0 marks a padding row.
      cu_q_lens: int32 [S + 1]; cumulative query counts; constant past num_seqs.
      num_decodes: int32 scalar; the first so many sequences have exactly one query row each. Backends treat them on a
        faster path, and the XLA one is fastest when they are sorted by seq_lens, longest first.
      num_seqs: int32 scalar; real sequences.
      scale: multiplies q . k before the softmax, usually d ** -0.5; finite, of any sign. Static.
      backend: from `resolve_backend`. Static.
      sliding_window: a query sees this many positions at most, its own included. Static.
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2); above 0, at most 10,000. Static.
      k_scale, v_scale: float32, broadcastable to [N, K]: one scale a block ([N, 1]), a head ([1, K]), or both. What the
        cache holds is multiplied by it. For a quantised cache only, and needed there.

    Returns:
      [T, H, d], dtype of q. A row's result depends on its own sequence alone: neither on its batch mates nor on T, S
      or B. That holds to the bit for the Pallas backends and for a deterministic one, otherwise up to rounding.

    Raises:
      ValueError: shapes or dtypes that do not fit together; the text names them.
      NotImplementedError: the backend can't run such a call (`resolve_backend` says so beforehand, except for the one
        limit on a cache's size that `pallas_triton` has).

    Source: PagedAttention (arXiv 2309.06180); online softmax (arXiv 1805.02867).
    """
    _check_numbers(q_THd, k_cache_NKbd, v_cache_NKbd, k_scale, v_scale)
    _check_batch(block_tables_SB, seq_lens_S)
    _check_features(scale, sliding_window, soft_cap)
    if cu_q_lens.shape != (seq_lens_S.shape[0] + 1,) or cu_q_lens.dtype != jnp.int32:
        raise ValueError(
            f"cu_q_lens must be int32 [S + 1] for {seq_lens_S.shape[0]} sequences, "
            f"got {cu_q_lens.dtype} {cu_q_lens.shape}"
        )
    return module_of(backend).ragged_paged_attention(
        q_THd,
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB=block_tables_SB,
        seq_lens_S=seq_lens_S,
        cu_q_lens=cu_q_lens,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
        scale=scale,
        backend=backend,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def paged_decode(
    q_SHd: jax.Array,
    k_cache_NKbd: jax.Array,
    v_cache_NKbd: jax.Array,
    *,
    block_tables_SB: jax.Array,
    seq_lens_S: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    backend: Backend,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """One query row for each sequence: `ragged_paged_attention` where every sequence decodes.

    Args: as there; only the first `num_seqs` rows are attended.

    Returns:
      [S, H, d], dtype of q. Rows with seq_len 0 and rows from num_seqs on are 0.

    Raises: as there.

    Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
    """
    _check_numbers(q_SHd, k_cache_NKbd, v_cache_NKbd, k_scale, v_scale)
    _check_batch(block_tables_SB, seq_lens_S)
    _check_features(scale, sliding_window, soft_cap)
    if q_SHd.shape[0] != seq_lens_S.shape[0]:
        raise ValueError(f"{q_SHd.shape[0]} query rows for {seq_lens_S.shape[0]} sequences of one each")
    return module_of(backend).paged_decode(
        q_SHd,
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB=block_tables_SB,
        seq_lens_S=seq_lens_S,
        num_seqs=num_seqs,
        scale=scale,
        backend=backend,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _check_numbers(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    shapes = f"{q.shape}, {k_cache.shape}, {v_cache.shape}"
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"expected q [T,H,d] and equal caches [N,K,b,d], got {shapes}")
    if 0 in (*q.shape, *k_cache.shape):
        raise ValueError(f"q and caches must not be empty, got {shapes}")
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(
            f"q {q.shape} does not match a cache of {k_cache.shape[1]} heads of {k_cache.shape[3]}"
        )
    if k_cache.dtype != v_cache.dtype or str(q.dtype) not in _QUERIES:
        raise ValueError(
            f"expected queries of {', '.join(_QUERIES)} and caches of one dtype, "
            f"got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    _check_scales(q, k_cache, k_scale, v_scale)


def _check_batch(tables: jax.Array, seq_lens: jax.Array) -> None:
    if tables.ndim != 2 or seq_lens.shape != tables.shape[:1] or 0 in tables.shape:
        raise ValueError(
            f"expected block tables [S,B] and sequence lengths [S], not empty, got {tables.shape} and {seq_lens.shape}"
        )
    if tables.dtype != jnp.int32 or seq_lens.dtype != jnp.int32:
        raise ValueError(
            f"block tables and sequence lengths must be int32, got {tables.dtype} and {seq_lens.dtype}"
        )


def _check_features(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if sliding_window is not None and not 1 <= sliding_window < 2**31:
        raise ValueError(f"sliding_window must be at least 1 and fit into 32 bits, got {sliding_window}")
    if soft_cap is not None and not 0 < soft_cap <= _MOST_SOFT_CAP:
        raise ValueError(f"soft_cap must be positive and at most {_MOST_SOFT_CAP}, got {soft_cap}")


def _check_scales(
    q: jax.Array, cache: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    if cache.dtype == q.dtype:
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"k_scale and v_scale are for a quantised cache, this one is {cache.dtype}")
        return
    if str(cache.dtype) not in _QUANTISED:
        raise ValueError(
            f"q and caches must share a float dtype, or the cache be one of {', '.join(_QUANTISED)}; "
            f"got {q.dtype} and {cache.dtype}"
        )
    num_blocks, num_kv_heads = cache.shape[:2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            raise ValueError(f"a cache of {cache.dtype} needs {name}")
        fits = scale.ndim == 2 and scale.shape[0] in (1, num_blocks) and scale.shape[1] in (1, num_kv_heads)
        if not fits or scale.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32, broadcastable to [{num_blocks}, {num_kv_heads}]; "
                f"got {scale.dtype} {scale.shape}"
            )
