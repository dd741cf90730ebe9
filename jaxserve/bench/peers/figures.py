"""What one pass says about a server: throughput and percentiles of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxserve.bench.peers.answer import Answer


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in seconds; None where no request had what is measured. Answers with a fault count as far as they came.

    Attributes:
      seconds: from the first request sent to the last answer ended.
      output_throughput: output tokens that came, a second.
      ttft_p50, ttft_p99: from sending a request to the first chunk with text.
      inter_token_p50, inter_token_p99: between consecutive chunks of an answer.
      inter_token_arriving_p99: the same, of the gaps during which another request was waiting for its first token.
      tokens_per_chunk: more than 1 where a peer joins tokens, which widens its gaps and lowers their number.
      latency_p50, latency_p99: from sending a request to the end of its answer.
      whole, requests: answers without a fault; all.
    """

    seconds: float
    output_throughput: float
    ttft_p50: float | None
    ttft_p99: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None
    inter_token_arriving_p99: float | None
    tokens_per_chunk: float | None
    latency_p50: float | None
    latency_p99: float | None
    whole: int
    requests: int


def figures_of(answers: Sequence[Answer]) -> Figures:
    """Figures of one pass, which has at least one request."""
    started = [answer for answer in answers if answer.chunks]
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.output_tokens for answer in answers)
    ttft = [answer.chunks[0] - answer.sent for answer in started]
    gaps = [gap for answer in started for gap in pairwise(answer.chunks)]
    lengths = [end - begin for begin, end in gaps]
    waits = merge([(answer.sent, answer.chunks[0] if answer.chunks else answer.ended) for answer in answers])
    arriving = [length for length, hit in zip(lengths, overlaps(gaps, waits), strict=True) if hit]
    latency = [answer.ended - answer.sent for answer in started]
    num_chunks = sum(len(answer.chunks) for answer in started)
    return Figures(
        seconds=seconds,
        output_throughput=tokens / seconds if seconds > 0 else 0.0,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        inter_token_p50=percentile(lengths, 50),
        inter_token_p99=percentile(lengths, 99),
        inter_token_arriving_p99=percentile(arriving, 99),
        tokens_per_chunk=sum(answer.output_tokens for answer in started) / num_chunks if num_chunks else None,
        latency_p50=percentile(latency, 50),
        latency_p99=percentile(latency, 99),
        whole=sum(answer.fault is None for answer in answers),
        requests=len(answers),
    )


def merge(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlaps(gaps: Sequence[tuple[float, float]], disjoint: Sequence[tuple[float, float]]) -> list[bool]:
    """For each gap, whether it shares more than a point with one of the disjoint, ordered intervals."""
    ends = np.array([end for _, end in disjoint])
    first_open = np.searchsorted(ends, [begin for begin, _ in gaps], side="right")
    return [
        index < len(disjoint) and disjoint[index][0] < end
        for index, (_, end) in zip(first_open.tolist(), gaps, strict=True)
    ]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """None for no values."""
    return float(np.percentile(values, percent)) if values else None
