"""The one interface to paged attention; callers never learn which backend runs.

Shape letters: T tokens of the packed batch, S sequences, B block-table width, N blocks in the cache,
b tokens a block holds, H query heads, K KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import xla

_RAGGED: dict[str, Callable[..., jax.Array]] = {"xla": xla.ragged_paged_attention}
_DECODE: dict[str, Callable[..., jax.Array]] = {"xla": xla.paged_decode}


def available_backends() -> tuple[str, ...]:
    """Names that `resolve_backend` takes besides "auto"."""
    return tuple(_RAGGED)


def resolve_backend(name: str, *, platform: str) -> str:
    """The backend that runs for `name` on `platform` ("cpu", "cuda", ...).

    Raises:
      ValueError: no backend of that name exists; the text lists those that do.
    """
    if name == "auto":
        return "xla"
    if name not in _RAGGED:
        raise ValueError(
            f"unknown attention backend {name!r} on {platform}; choose from: auto, {', '.join(_RAGGED)}"
        )
    return name


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
    backend: str,
) -> jax.Array:
    """Causal attention of one packed batch that mixes decode rows and prefill chunks.

    The keys and values of the batch's own tokens must already stand in the cache. Query head h reads KV head
    h // (H / K). Sequence s owns the query rows cu_q_lens[s] .. cu_q_lens[s + 1]; they are its last tokens, so
    query row i of n stands at position seq_lens[s] - n + i and sees every position up to its own.

    Args:
      q_THd: float; queries, packed. Rows past cu_q_lens[num_seqs] are padding; what they yield is unspecified
        (finite).
      k_cache_NKbd, v_cache_NKbd: same dtype as q; slots that no sequence's tokens fill may hold anything, NaN
        included.
      block_tables_SB: int32; entry j of row s holds positions j * b .. (j + 1) * b of sequence s. Entries past the
        sequence's length must be valid block ids (0, the sink, will do).
      seq_lens_S: int32; tokens of each sequence in the cache, this batch's included. 0 marks a padding row.
      cu_q_lens: int32 [S + 1]; cumulative query counts; constant past num_seqs.
      num_decodes: int32 scalar; the first so many sequences have exactly one query row each. Backends may treat
        them on a faster path, and are fastest when they are sorted by seq_lens, longest first.
      num_seqs: int32 scalar; real sequences.
      scale: multiplies q . k before the softmax, usually d ** -0.5.
      backend: as returned by `resolve_backend`.

    Returns:
      [T, H, d], dtype of q. Row results depend on that row's own sequence alone: neither on its batch mates nor on
      T, S or B.

    Source: PagedAttention (arXiv 2309.06180); online softmax (arXiv 1805.02867).
    """
    _check(q_THd, k_cache_NKbd, v_cache_NKbd, block_tables_SB, seq_lens_S)
    return _RAGGED[backend](
        q_THd,
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB=block_tables_SB,
        seq_lens_S=seq_lens_S,
        cu_q_lens=cu_q_lens,
        num_decodes=num_decodes,
        num_seqs=num_seqs,
        scale=scale,
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
    backend: str,
) -> jax.Array:
    """One query row for each sequence: `ragged_paged_attention` where every sequence decodes.

    Returns:
      [S, H, d], dtype of q. Rows with seq_len 0 are 0.
    """
    _check(q_SHd, k_cache_NKbd, v_cache_NKbd, block_tables_SB, seq_lens_S)
    return _DECODE[backend](
        q_SHd,
        k_cache_NKbd,
        v_cache_NKbd,
        block_tables_SB=block_tables_SB,
        seq_lens_S=seq_lens_S,
        num_seqs=num_seqs,
        scale=scale,
    )


def _check(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: jax.Array, seq_lens: jax.Array
) -> None:
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"expected q [T,H,d] and equal caches [N,K,b,d], got {q.shape}, {k_cache.shape}, {v_cache.shape}"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[1]:
        raise ValueError(
            f"q {q.shape} does not match a cache of {k_cache.shape[1]} heads of {k_cache.shape[3]}"
        )
    if not (q.dtype == k_cache.dtype == v_cache.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q and caches must share a float dtype, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if tables.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"{tables.shape[0]} block tables for {seq_lens.shape[0]} sequence lengths")
