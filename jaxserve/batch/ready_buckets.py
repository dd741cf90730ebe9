"""The shapes whose programs are ready: while some are still being compiled, a step takes the next larger one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.stats import ReadyShapes


class ReadyBuckets:
    """Offers what `ShapeBuckets` does, of the shapes marked so far. One thread marks, another may look.

    Attributes:
      planned: all shapes there will be.
      progress: how many of them are ready.
    """

    def __init__(self, planned: ShapeBuckets) -> None:
        self.planned = planned
        self.progress = ReadyShapes(0, len(planned.all_buckets()))
        self._ready = ShapeBuckets(
            (), planned.blocks
        )  # replaced as a whole, so a reader never sees half a change

    def mark(self, bucket: Bucket) -> None:
        """From now on `smallest_for` may name it."""
        known = {(b.tokens, b.seqs) for b in (*self._ready.all_buckets(), bucket)}
        shapes = tuple(
            (tokens, kept)
            for tokens, seqs in self.planned.seqs_by_tokens
            if (kept := tuple(size for size in seqs if (tokens, size) in known))
        )
        self._ready = ShapeBuckets(shapes, self.planned.blocks)
        self.progress.ready = len(known)

    @property
    def blocks(self) -> int:
        """B of every shape."""
        return self.planned.blocks

    def all_buckets(self) -> list[Bucket]:
        """Every planned shape, ready or not, largest first."""
        return self.planned.all_buckets()

    def ready(self) -> list[Bucket]:
        """Those that are, largest first."""
        return self._ready.all_buckets()

    def smallest_for(self, num_tokens: int, num_seqs: int) -> Bucket:
        """The smallest ready bucket that holds the batch; once the largest is ready there always is one."""
        return self._ready.smallest_for(num_tokens, num_seqs)

    def round_up(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """(T, S) of `smallest_for`."""
        return self._ready.round_up(num_tokens, num_seqs)


def in_order_of_use(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The order to compile in. The first two run any step: the largest holds every one (and needs the most memory, so
    that a lack of it shows at once), the smallest spares a lone request its padding. Then always the middle of the
    widest gap, as a ratio of tokens; further sizes of S last.
    """
    ascending = sorted(buckets)
    # Of each T the one with the most rows: it serves all steps of so many tokens.
    widest = {bucket.tokens: bucket for bucket in ascending}
    sizes = sorted(widest)
    order = [sizes[-1], *sizes[:1]] if len(sizes) > 1 else sizes
    while len(order) < len(sizes):
        taken = sorted(order)
        gaps = [(b / a, a, b) for a, b in pairwise(taken)]
        inside = [(ratio, [s for s in sizes if a < s < b], a * b) for ratio, a, b in gaps]
        _, candidates, product = max(gap for gap in inside if gap[1])
        order.append(min(candidates, key=lambda s: max(s * s / product, product / (s * s))))
    first = [widest[size] for size in order]
    return [*first, *(bucket for bucket in reversed(ascending) if bucket not in set(first))]
