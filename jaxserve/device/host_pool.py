"""KV blocks in host memory, all allocated beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.config import ModelConfig


class HostPool:
    """One array [blocks, 2 * L, K, b, d]: of each block all layers' keys, then all layers' values."""

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int, dtype: np.dtype) -> None:
        shape = (2 * model.num_layers, model.num_kv_heads, block_size, model.head_dim)
        self._blocks = np.empty((num_blocks, *shape), dtype)
        self._blocks.fill(0)  # the memory is had now, not in the middle of serving

    @property
    def num_blocks(self) -> int:
        return self._blocks.shape[0]

    @property
    def num_bytes(self) -> int:
        return self._blocks.nbytes

    def write(self, block_ids: Sequence[int], values: np.ndarray) -> None:
        """Store the first `len(block_ids)` of `values` [>= that, 2 * L, K, b, d]; no id may occur twice."""
        self._blocks[list(block_ids)] = values[: len(block_ids)]

    def read(self, block_ids: Sequence[int], count: int) -> np.ndarray:
        """A copy of these blocks [count, 2 * L, K, b, d], zeros behind them: the device may read it at any time."""
        values = np.empty((count, *self._blocks.shape[1:]), self._blocks.dtype)
        np.take(self._blocks, block_ids, axis=0, out=values[: len(block_ids)], mode="clip")
        values[len(block_ids) :] = 0
        return values
