"""What `/metrics` says of preemptions and of KV blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from jaxserve.server.metric_families import Families
from jaxserve.stats import EngineStats


def swap_metrics(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    swap, families = stats.swap, Families(model_name)
    blocks = {"out": swap.out_blocks, "in": swap.in_blocks}
    yield families.counter(
        "preemptions",
        "Preempted sequences, by what becomes of their KV blocks: kept in host memory, or computed again.",
        {"swap": swap.preemptions, "recompute": stats.preemptions - swap.preemptions},
        "kind",
    )
    yield families.counter("swap_blocks", "KV blocks moved to host memory, and back.", blocks, "direction")
    num_bytes = {way: count * swap.block_bytes for way, count in blocks.items()}
    yield families.counter("swap_bytes", "Their bytes.", num_bytes, "direction")
    yield families.gauge(
        "host_tier_blocks",
        "KV blocks in host memory: that there is room for, that hold something, that are kept for the preempted.",
        {"all": swap.blocks, "used": swap.used_blocks, "pinned": swap.pinned_blocks},
        "state",
    )
    yield families.gauge(
        "swap_bytes_per_second",
        "Transfer rates as measured so far.",
        {"out": swap.out_bytes_per_second, "in": swap.in_bytes_per_second},
        "direction",
    )
    yield families.counter(
        "swapped_requests", "Starts of sequences that brought blocks in from host memory.", swap.requests_in
    )
    yield families.counter("host_tier_hits", "Prompt tokens found in host memory.", swap.hits)
    yield families.counter(
        "host_tier_evictions", "Blocks that went from host memory for others.", swap.evictions
    )
