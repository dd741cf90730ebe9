"""KV blocks in host memory, all allocated beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class HostPool:
    """One array [blocks, values]: of each block all layers' keys, then all layers' values.

    Args:
      block_bytes: of one block.
    """

    def __init__(self, num_blocks: int, block_bytes: int, dtype: np.dtype) -> None:
        self._blocks = np.empty((num_blocks, block_bytes // dtype.itemsize), dtype)
        self._blocks.fill(0)  # the memory is had now, not in the middle of serving

    @property
    def num_blocks(self) -> int:
        return self._blocks.shape[0]

    @property
    def num_bytes(self) -> int:
        return self._blocks.nbytes

    def write(self, block_ids: Sequence[int], values: np.ndarray) -> None:
        """Store the first `len(block_ids)` of `values` [>= that, values]; no id may occur twice."""
        self._blocks[list(block_ids)] = values[: len(block_ids)]

    def read(self, block_ids: Sequence[int], count: int) -> np.ndarray:
        """A copy of these blocks [count, values], zeros behind them: the device may read it at any time."""
        values = np.empty((count, *self._blocks.shape[1:]), self._blocks.dtype)
        np.take(self._blocks, block_ids, axis=0, out=values[: len(block_ids)], mode="clip")
        values[len(block_ids) :] = 0
        return values
