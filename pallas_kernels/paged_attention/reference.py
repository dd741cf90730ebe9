"""Paged attention in float64 numpy, written for clarity: what every backend is compared with."""

from __future__ import annotations

import numpy as np


def ragged_paged_attention(
    q_THd: np.ndarray,
    k_cache_NKbd: np.ndarray,
    v_cache_NKbd: np.ndarray,
    *,
    block_tables_SB: np.ndarray,
    seq_lens_S: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> np.ndarray:
    """See `api.ragged_paged_attention`. Returns float64 [T, H, d]; padding rows are 0."""
    num_heads, num_kv_heads = q_THd.shape[1], k_cache_NKbd.shape[1]
    out = np.zeros(q_THd.shape, np.float64)
    for s in range(num_seqs):
        first, end = int(cu_q_lens[s]), int(cu_q_lens[s + 1])
        length = int(seq_lens_S[s])
        keys_LKd = _sequence(k_cache_NKbd, k_scale, block_tables_SB[s], length)
        values_LKd = _sequence(v_cache_NKbd, v_scale, block_tables_SB[s], length)
        query, key = np.arange(length - (end - first), length)[:, None], np.arange(length)
        visible = key <= query
        if sliding_window is not None:
            visible &= key > query - sliding_window
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = q_THd[first:end, head].astype(np.float64) @ keys_LKd[:, kv_head].T * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[first:end, head] = weights / weights.sum(axis=1, keepdims=True) @ values_LKd[:, kv_head]
    return out


def _sequence(
    cache_NKbd: np.ndarray, scale: np.ndarray | None, table_B: np.ndarray, length: int
) -> np.ndarray:
    """float64 [L, K, d]: one sequence's keys or values, in order and dequantised."""
    num_blocks, num_kv_heads, block_size, _ = cache_NKbd.shape
    position = np.arange(length)
    block = table_B[position // block_size]
    found = cache_NKbd[block, :, position % block_size].astype(np.float64)
    if scale is not None:
        found *= np.broadcast_to(scale, (num_blocks, num_kv_heads))[block][..., None]
    return found
