"""Random paged-attention problems: shuffled blocks, ragged lengths, everything unused poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Arguments of `ragged_paged_attention` as numpy arrays (float32 values), plus the scale."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_decodes: int
    num_seqs: int
    scale: float


def make_problem(
    rng: np.random.Generator,
    *,
    contexts: list[int],
    query_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    pad_tokens: int = 0,
    pad_seqs: int = 0,
    pad_blocks: int = 0,
) -> Problem:
    """`contexts` are tokens before the batch's own `query_lens`; sequences of one query come first."""
    order = sorted(range(len(contexts)), key=lambda i: query_lens[i] != 1)
    contexts = [contexts[i] for i in order]
    query_lens = [query_lens[i] for i in order]
    num_seqs = len(contexts)
    lens = [c + q for c, q in zip(contexts, query_lens, strict=True)]
    blocks = [-(-n // block_size) for n in lens]
    width = max(blocks) + pad_blocks
    num_blocks = sum(blocks) + 4
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    k_cache = np.full((num_blocks, kv_heads, block_size, head_dim), np.nan, np.float32)
    v_cache = np.full_like(k_cache, np.nan)
    tables = np.zeros((num_seqs + pad_seqs, width), np.int32)
    for s, length in enumerate(lens):
        for j in range(blocks[s]):
            block = int(next(ids))
            tables[s, j] = block
            filled = min(block_size, length - j * block_size)
            k_cache[block, :, :filled] = rng.standard_normal((kv_heads, filled, head_dim))
            v_cache[block, :, :filled] = rng.standard_normal((kv_heads, filled, head_dim))
    total = sum(query_lens)
    cu = np.concatenate([[0], np.cumsum(query_lens), np.full(pad_seqs, total)]).astype(np.int32)
    return Problem(
        q=rng.standard_normal((total + pad_tokens, heads, head_dim)).astype(np.float32),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        seq_lens=np.array(lens + [0] * pad_seqs, np.int32),
        cu_q_lens=cu,
        num_decodes=sum(n == 1 for n in query_lens),
        num_seqs=num_seqs,
        scale=head_dim**-0.5,
    )
