"""What `/metrics` says of speculative decoding, under vLLM's names; nothing where the engine does not speculate."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from jaxserve.stats import EngineStats


def speculation_metrics(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    counts = stats.speculation
    if not counts.accepted_by_position:
        return
    for name, text, value in (
        ("num_drafts", "Drafts verified, one a sequence and step.", counts.drafts),
        ("num_draft_tokens", "Tokens in them.", counts.draft_tokens),
        (
            "num_accepted_tokens",
            "Those of them that the model would have said itself.",
            counts.accepted_tokens,
        ),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
    positions = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by their place in the draft, from 0.",
        labels=["model_name", "position"],
    )
    for position, count in enumerate(counts.accepted_by_position):
        positions.add_metric([model_name, str(position)], count)
    yield positions
