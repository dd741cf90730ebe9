"""How the masks of grammars are packed: a bit a token, bit i of word w for token 32 w + i, uint32 [S, W]."""

from __future__ import annotations

import numpy as np


def mask_words(vocab_size: int) -> int:
    """W: words that hold a bit a token."""
    return -(-vocab_size // 32)


def no_masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """Masks that allow everything."""
    return np.full((num_rows, mask_words(vocab_size)), 2**32 - 1, np.uint32)
