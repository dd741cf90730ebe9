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
) -> np.ndarray:
    """See `api.ragged_paged_attention`. Returns float64 [T, H, d]; padding rows are 0."""
    num_heads = q_THd.shape[1]
    _, num_kv_heads, block_size, _ = k_cache_NKbd.shape
    out = np.zeros(q_THd.shape, np.float64)
    for s in range(num_seqs):
        first, end = int(cu_q_lens[s]), int(cu_q_lens[s + 1])
        length = int(seq_lens_S[s])
        position = np.arange(length)
        slots = block_tables_SB[s, position // block_size], slice(None), position % block_size
        keys_LKd = k_cache_NKbd[slots].astype(np.float64)
        values_LKd = v_cache_NKbd[slots].astype(np.float64)
        for row in range(first, end):
            visible = length - (end - row) + 1
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = keys_LKd[:visible, kv_head] @ q_THd[row, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = (weights / weights.sum()) @ values_LKd[:visible, kv_head]
    return out
