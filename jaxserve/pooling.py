"""Embeddings: one vector for a whole prompt, pooled of its tokens' final hidden states (after the last norm).

A mean does not depend on how the prompt is cut into steps, nor on the order in which these come: hidden states are
rounded to multiples of 2**-24 first, and a float64 adds such numbers exactly up to 2**29. So where a token's hidden
state has the same bits in any company, as in deterministic mode, so has the embedding. The rounding costs at most 3e-8
a component, where the components of a normed vector are about 1.
"""

from __future__ import annotations

import numpy as np

from jaxserve.outputs import PooledTokens
from jaxserve.request import Pooling

_STEPS_OF_ONE = 2.0**24


def sum_hidden(hidden_ND: np.ndarray) -> np.ndarray:
    """Of any float dtype; float64 [D]."""
    scaled_ND = hidden_ND.astype(np.float64)
    scaled_ND *= _STEPS_OF_ONE
    np.rint(scaled_ND, out=scaled_ND)
    total_D: np.ndarray = scaled_ND.sum(axis=0) / _STEPS_OF_ONE
    return total_D


class Pool:
    """One request's embedding while its steps run."""

    def __init__(self, pooling: Pooling, num_prompt_tokens: int) -> None:
        self._pooling = pooling
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0  # pooled so far, from the first on
        self._vector_D: np.ndarray | None = None

    def add(self, part: PooledTokens) -> None:
        """Take in what a step says. A request that was preempted begins again at its first token.

        Raises:
          RuntimeError: tokens are missing in between.
        """
        if self._pooling == "last" or part.start == 0:
            self._vector_D = part.vector
        elif self._vector_D is None or part.start != self._num_tokens:
            raise RuntimeError(f"tokens from {part.start} on, but {self._num_tokens} are pooled")
        else:
            self._vector_D = self._vector_D + part.vector
        self._num_tokens = part.start + part.count

    def embedding(self) -> np.ndarray | None:
        """float32 [D] of length 1; None while tokens are missing, as at an early end."""
        if self._vector_D is None or self._num_tokens != self._num_prompt_tokens:
            return None
        return normalise(self._vector_D)


def normalise(vector_D: np.ndarray) -> np.ndarray:
    """The float32 vector of length 1 in this direction. A mean needs no division before: its length is lost anyway."""
    length = float(np.linalg.norm(vector_D))
    return (vector_D / length if length > 0 else vector_D).astype(np.float32)
