"""The shape of a batch. Apart from `buckets`, which chooses shapes, because programs depend on this alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One shape: tokens, sequences (= rows of logits), and block-table width."""

    tokens: int
    seqs: int
    blocks: int

    def __str__(self) -> str:
        return f"T{self.tokens}xS{self.seqs}xB{self.blocks}"
