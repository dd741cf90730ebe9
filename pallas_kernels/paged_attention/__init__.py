"""Attention of packed, variable-length queries over a block-table KV cache."""

from pallas_kernels.paged_attention.api import (
    available_backends,
    paged_decode,
    ragged_paged_attention,
    resolve_backend,
)

__all__ = ["available_backends", "paged_decode", "ragged_paged_attention", "resolve_backend"]
