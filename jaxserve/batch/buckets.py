"""Every padded size there is. The only place that rounds up; warm-up walks `all_buckets`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.bucket_plan import MIN_SIZE, Shapes, best_plans, top_rows
from jaxserve.batch.step_sizes import StepLimits, typical_steps
from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class ShapeBuckets:
    """The closed set of shapes of an engine.

    Attributes:
      seqs_by_tokens: (T, its sizes of S, ascending), by ascending T.
      blocks: B. One size serves all: attention walks each sequence's own length, so a wide table costs only its
        few bytes.
    """

    seqs_by_tokens: Shapes
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
        sizes, buckets = self._by_tokens
        for fitting in buckets[bisect_left(sizes, num_tokens) :]:
            for bucket in fitting:
                if bucket.seqs >= num_seqs:
                    return bucket
        raise ConfigError(f"no bucket holds {num_tokens} tokens of {num_seqs} sequences")

    @cached_property
    def _by_tokens(self) -> tuple[list[int], list[list[Bucket]]]:
        """Sizes of T, and the buckets of each. Asked several times a step."""
        sizes = [tokens for tokens, _ in self.seqs_by_tokens]
        return sizes, [[Bucket(tokens, s, self.blocks) for s in seqs] for tokens, seqs in self.seqs_by_tokens]

    def decode_buckets(self) -> set[Bucket]:
        """Those that batches of rows of one token come in."""
        most = max(seqs[-1] for _, seqs in self.seqs_by_tokens)
        return {self.smallest_for(rows, rows) for rows in range(1, most + 1)}

    def round_up(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """(T, S) of `smallest_for`."""
        bucket = self.smallest_for(num_tokens, num_seqs)
        return bucket.tokens, bucket.seqs


def default_buckets(config: ResolvedConfig) -> ShapeBuckets:
    """The shapes of an engine that was given no plan."""
    return planned_buckets(default_shapes(step_limits(config)), config)


def default_shapes(limits: StepLimits) -> Shapes:
    """The best plan for steps of which nothing is known (`typical_steps`), with `default_num_shapes` shapes."""
    budget = default_num_shapes(limits)
    return best_plans(typical_steps(limits), limits, max_shapes=budget).plan(budget)


def planned_buckets(shapes: Shapes, config: ResolvedConfig) -> ShapeBuckets:
    """The shapes of a plan that this engine can need; raises ConfigError as `buckets_for` does."""
    return buckets_for(shapes, step_limits(config), blocks=config.max_blocks_per_seq)


def buckets_for(shapes: Shapes, limits: StepLimits, *, blocks: int = 0) -> ShapeBuckets:
    """The shapes of a plan that steps within the limits can need, the largest cut to the limits.

    Args:
      blocks: the block-table width.

    Raises:
      ConfigError: the plan does not hold the largest steps.
    """
    tokens, rows = shapes[-1]
    if tokens < limits.max_tokens or rows[-1] < limits.max_seqs:
        raise ConfigError(
            f"the bucket plan holds steps of up to {tokens} tokens and {rows[-1]} sequences, but there may be some of "
            f"{limits.max_tokens} and {limits.max_seqs}: plan again with these limits, or lower the engine's"
        )
    most = max(MIN_SIZE, limits.max_tokens)
    last = bisect_left(shapes, most, key=lambda entry: entry[0])
    kept: list[tuple[int, tuple[int, ...]]] = []
    for size, rows in (*shapes[:last], (most, shapes[last][1])):
        top = top_rows(size, limits)
        kept.append((size, (*(count for count in rows if count < top), top)))
    return ShapeBuckets(tuple(kept), blocks)


def step_limits(config: ResolvedConfig) -> StepLimits:
    """The largest step of an engine."""
    return StepLimits(config.max_num_batched_tokens, config.max_rows)


def default_num_shapes(limits: StepLimits) -> int:
    """The compile budget where none is given: each shape costs seconds of a first start.

    Half as many again as a plain ladder has (T of 2, 8, 16, 32, then two sizes an octave; of these S for all rows, and
    16, 64, 256 where that is a quarter of T or less). So 22 for 256 tokens and 64 sequences, 51 for 2048 and 256.
    """
    most = max(MIN_SIZE, limits.max_tokens)
    sizes, size = {MIN_SIZE, 8, 16, 32}, 32
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    ladder = {size for size in sizes if size < most} | {most}
    rungs = sum(
        1 + sum(rows < top_rows(size, limits) and rows * 4 <= size for rows in (16, 64, 256))
        for size in ladder
    )
    return rungs * 3 // 2
