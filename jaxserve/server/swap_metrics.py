"""What `/metrics` says of preemptions and of KV blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from jaxserve.stats import EngineStats


def swap_metrics(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    swap = stats.swap
    counters: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        (
            "jaxserve:preemptions",
            "Preempted sequences, by what becomes of their KV blocks: kept in host memory, or computed again.",
            "kind",
            {"swap": swap.preemptions, "recompute": stats.preemptions - swap.preemptions},
        ),
        (
            "jaxserve:swap_blocks",
            "KV blocks moved to host memory, and back.",
            "direction",
            {"out": swap.out_blocks, "in": swap.in_blocks},
        ),
        (
            "jaxserve:swap_bytes",
            "Their bytes.",
            "direction",
            {"out": swap.out_blocks * swap.block_bytes, "in": swap.in_blocks * swap.block_bytes},
        ),
    )
    gauges: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        (
            "jaxserve:host_tier_blocks",
            "KV blocks in host memory: that there is room for, that hold something, that are kept for the preempted.",
            "state",
            {"all": swap.blocks, "used": swap.used_blocks, "pinned": swap.pinned_blocks},
        ),
        (
            "jaxserve:swap_bytes_per_second",
            "Transfer rates as measured so far.",
            "direction",
            {"out": swap.out_bytes_per_second, "in": swap.in_bytes_per_second},
        ),
    )
    for kind, families in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, text, label, values in families:
            family = kind(name, text, labels=["model_name", label])
            for value, number in values.items():
                family.add_metric([model_name, value], number)
            yield family
    for name, text, number in (
        (
            "jaxserve:swapped_requests",
            "Starts of sequences that brought blocks in from host memory.",
            swap.requests_in,
        ),
        ("jaxserve:host_tier_hits", "Prompt tokens found in host memory.", swap.hits),
        ("jaxserve:host_tier_evictions", "Blocks that went from host memory for others.", swap.evictions),
    ):
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model_name], number)
        yield counter
