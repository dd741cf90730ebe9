"""Attention kernels over a paged KV cache. Imports nothing of jaxserve."""
