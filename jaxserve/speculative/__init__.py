"""Speculative decoding: who proposes drafts, and how far they go. Verification is the step itself."""
