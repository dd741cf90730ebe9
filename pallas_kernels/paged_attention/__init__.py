"""Attention of packed, variable-length queries over a block-table KV cache."""

from pallas_kernels.paged_attention.api import paged_decode, ragged_paged_attention
from pallas_kernels.paged_attention.backends import XLA, Backend, backend_names, resolve_backend
from pallas_kernels.paged_attention.spec import H200, AttentionSpec, DeviceFacts, facts_of

__all__ = [
    "H200",
    "XLA",
    "AttentionSpec",
    "Backend",
    "DeviceFacts",
    "backend_names",
    "facts_of",
    "paged_decode",
    "ragged_paged_attention",
    "resolve_backend",
]
