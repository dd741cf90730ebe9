"""Speculative decoding: proposers and verification (to come)."""
