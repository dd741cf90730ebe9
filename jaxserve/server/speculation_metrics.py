"""What `/metrics` says of speculative decoding, under vLLM's names; nothing where the engine does not speculate."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from jaxserve.server.metric_families import vllm_families
from jaxserve.stats import EngineStats


def speculation_metrics(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    counts = stats.speculation
    if not counts.accepted_by_position:
        return
    families = vllm_families(model_name, "vllm:spec_decode_")
    yield families.counter("num_drafts", "Drafts verified, one a sequence and step.", counts.drafts)
    yield families.counter("num_draft_tokens", "Tokens in them.", counts.draft_tokens)
    yield families.counter(
        "num_accepted_tokens", "Those of them that the model would have said itself.", counts.accepted_tokens
    )
    yield families.counter(
        "num_accepted_tokens_per_pos",
        "Accepted tokens by their place in the draft, from 0.",
        {str(position): count for position, count in enumerate(counts.accepted_by_position)},
        "position",
    )
