"""Views of a step and of the pool, made of the scheduler's own state when somebody looks."""

from __future__ import annotations

from jaxserve.engine_view import MAX_CELLS, PoolView, StepView
from jaxserve.scheduler.block_pool import BlockPool
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.output import SchedulerOutput


def view_step(plan: SchedulerOutput, bucket_tokens: int, bucket_seqs: int) -> StepView:
    """What a plan fills a bucket with."""
    decode = 0
    prefill: list[int] = []
    for item in plan.scheduled:
        if item.is_single:
            decode += 1
        else:
            prefill.append(item.num_scheduled_tokens)
    draft = plan.num_draft_tokens
    return StepView(
        step_id=plan.step_id,
        bucket_tokens=bucket_tokens,
        bucket_seqs=bucket_seqs,
        decode=decode,
        draft=draft,
        prefill=tuple(prefill),
        padding=bucket_tokens - decode - draft - sum(prefill),
    )


def view_pool(pool: BlockPool, host: HostTier, max_cells: int = MAX_CELLS) -> PoolView:
    """The map of a pool. O(num_blocks), by `list.count` on slices: 0.1 to 1 microsecond a block."""
    ref_counts, digests = pool.snapshot()
    per_cell = -(-pool.num_blocks // max_cells)
    used_cells: list[int] = []
    shared_cells: list[int] = []
    cached_cells: list[int] = []
    for start in range(0, pool.num_blocks, per_cell):
        counts = ref_counts[start : start + per_cell]
        free, used = counts.count(0), counts.count(1)
        used_cells.append(used)
        shared_cells.append(len(counts) - free - used)
        cached_cells.append(_num_findable(counts, digests[start : start + per_cell]) if free else 0)
    return PoolView(
        num_blocks=pool.num_blocks,
        used=sum(used_cells),
        shared=sum(shared_cells),
        cached=sum(cached_cells),
        blocks_per_cell=per_cell,
        used_cells=tuple(used_cells),
        shared_cells=tuple(shared_cells),
        cached_cells=tuple(cached_cells),
        host_blocks=host.num_blocks,
        host_used=host.num_used,
        host_pinned=host.num_pinned,
    )


def _num_findable(ref_counts: list[int], digests: list[bytes | None]) -> int:
    """Blocks that nobody holds and that a prefix lookup finds."""
    if not any(digests):
        return 0
    return sum(digest is not None and not count for count, digest in zip(ref_counts, digests, strict=True))
