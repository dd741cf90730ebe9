"""Every padded size there is. The only place that rounds up; warm-up walks `all_buckets`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError

_MIN_TOKENS = 2  # one row alone collapses to a slow matrix-vector path on CPUs
_ROUGH_TOKENS = (8, 16, 32)  # small sizes cost almost the same, so few will do
_LOGIT_ROWS = (16, 64, 256)  # row counts for batches that are mostly prefill
_PREFILL_RATIO = 4  # tokens to rows, from which on a batch counts as mostly prefill


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One shape: tokens, sequences (= rows of logits), and block-table width."""

    tokens: int
    seqs: int
    blocks: int

    def __str__(self) -> str:
        return f"T{self.tokens}xS{self.seqs}xB{self.blocks}"


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    """The closed set of shapes of an engine.

    Attributes:
      seqs_by_tokens: (T, its sizes of S, ascending), by ascending T.
      blocks: B. One size serves all: attention walks each sequence's own length, so a wide table costs only its
        few bytes.
    """

    seqs_by_tokens: tuple[tuple[int, tuple[int, ...]], ...]
    blocks: int

    def all_buckets(self) -> list[Bucket]:
        """Every shape, largest first (it also needs the most memory, so a lack of it shows at once)."""
        return sorted(
            (Bucket(tokens, s, self.blocks) for tokens, seqs in self.seqs_by_tokens for s in seqs),
            reverse=True,
        )

    def smallest_for(self, num_tokens: int, num_seqs: int) -> Bucket:
        """The smallest bucket that holds the batch.

        Raises:
          ConfigError: none does; a scheduler that keeps to its limits can't cause this.
        """
        at = bisect_left(self.seqs_by_tokens, num_tokens, key=lambda entry: entry[0])
        for tokens, seqs in self.seqs_by_tokens[at:]:
            for size in seqs:
                if size >= num_seqs:
                    return Bucket(tokens, size, self.blocks)
        raise ConfigError(f"no bucket holds {num_tokens} tokens of {num_seqs} sequences")


def default_buckets(config: ResolvedConfig) -> ShapeBuckets:
    """Token sizes 2, 8, 16, 32, then two steps an octave; a second, smaller row count where prefill dominates."""
    most = max(_MIN_TOKENS, config.max_num_batched_tokens)
    sizes = {_MIN_TOKENS, *_ROUGH_TOKENS}
    size = _ROUGH_TOKENS[-1]
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    tokens = sorted({t for t in sizes if t < most} | {most})
    return ShapeBuckets(
        tuple((t, _row_sizes(t, config.max_num_seqs)) for t in tokens), blocks=config.max_blocks_per_seq
    )


def _row_sizes(tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    most = min(tokens, max(_MIN_TOKENS, max_num_seqs))
    return (*(rows for rows in _LOGIT_ROWS if rows < most and rows * _PREFILL_RATIO <= tokens), most)
