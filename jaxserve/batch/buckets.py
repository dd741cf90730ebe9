"""Every padded size there is. The only place that rounds up; warm-up walks `all_buckets`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError

_MIN_TOKENS = 2  # one row alone collapses to a slow matrix-vector path on CPUs
_LOGIT_ROWS = (16, 64, 256)  # row counts for batches that are mostly prefill


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
            (Bucket(tokens, s, self.blocks) for tokens, seqs in self.seqs_by_tokens for s in seqs), reverse=True
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
    """Token sizes 2, 4, 8, 16, then two steps an octave; few row counts for each.

    Padding wastes at most a third of a step's tokens, and a quarter on average.
    """
    tokens: list[int] = []
    size = _MIN_TOKENS
    while size < config.max_num_batched_tokens:
        tokens.append(size)
        half_step = size + size // 2
        if size >= 16 and half_step < config.max_num_batched_tokens:
            tokens.append(half_step)
        size *= 2
    tokens.append(max(_MIN_TOKENS, config.max_num_batched_tokens))
    return ShapeBuckets(
        tuple((t, _row_sizes(t, config.max_num_seqs)) for t in tokens), blocks=config.max_blocks_per_seq
    )


def _row_sizes(tokens: int, max_num_seqs: int) -> tuple[int, ...]:
    most = min(tokens, max(_MIN_TOKENS, max_num_seqs))
    return (*(size for size in _LOGIT_ROWS if size < most), most)
