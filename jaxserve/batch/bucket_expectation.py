"""What a set of shapes should do to steps of a known distribution: padding by bucket, packing efficiency, time lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.bucket_plan import StepCost
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.step_sizes import StepSizes


@dataclass(frozen=True, slots=True)
class BucketExpectation:
    """One bucket.

    Attributes:
      step_share: of all steps, those that go here.
      useful_tokens, useful_rows: mean of these steps, before padding; 0 where no step comes.
      padding_share: of all padding tokens, those added here.
    """

    bucket: Bucket
    step_share: float
    useful_tokens: float
    useful_rows: float
    padding_share: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """All of them, in ascending order.

    Attributes:
      packing_efficiency: useful tokens / computed tokens.
      row_efficiency: the same of rows of logits.
      time_lost: share of the steps' time (as `StepCost` has it) that padding takes.
    """

    buckets: tuple[BucketExpectation, ...]
    packing_efficiency: float
    row_efficiency: float
    time_lost: float


def expect(buckets: ShapeBuckets, sizes: StepSizes, cost: StepCost) -> Expectation:
    """Put every step into its bucket.

    Args:
      sizes: within what the buckets hold; total weight above 0.
    """
    steps: defaultdict[Bucket, float] = defaultdict(float)
    tokens: defaultdict[Bucket, float] = defaultdict(float)
    rows: defaultdict[Bucket, float] = defaultdict(float)
    for (num_tokens, num_seqs), weight in sizes.weights.items():
        bucket = buckets.smallest_for(num_tokens, num_seqs)
        steps[bucket] += weight
        tokens[bucket] += weight * num_tokens
        rows[bucket] += weight * num_seqs
    total = sum(steps.values())
    computed_tokens = sum(weight * bucket.tokens for bucket, weight in steps.items())
    computed_rows = sum(weight * bucket.seqs for bucket, weight in steps.items())
    useful_tokens, useful_rows = sum(tokens.values()), sum(rows.values())
    padding = computed_tokens - useful_tokens
    time = cost.of(computed_tokens / total, computed_rows / total)
    return Expectation(
        tuple(
            BucketExpectation(
                bucket,
                step_share=steps[bucket] / total,
                useful_tokens=tokens[bucket] / steps[bucket] if steps[bucket] else 0.0,
                useful_rows=rows[bucket] / steps[bucket] if steps[bucket] else 0.0,
                padding_share=(steps[bucket] * bucket.tokens - tokens[bucket]) / padding if padding else 0.0,
            )
            for bucket in reversed(buckets.all_buckets())
        ),
        packing_efficiency=useful_tokens / computed_tokens,
        row_efficiency=useful_rows / computed_rows,
        time_lost=1 - cost.of(useful_tokens / total, useful_rows / total) / time,
    )
