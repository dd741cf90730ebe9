"""What a pass was like: percentiles of latencies, goodput and refusals, in all and by service class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.request import ServiceClass
from jaxserve.simulation.drive import Drive, RequestTimes

PERCENTS = (50, 90, 99)
MEASURES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of some requests of a pass. Seconds, by percent (`PERCENTS`); empty where there is nothing to measure.

    Attributes:
      ttft: arrival to first token; of all that had one.
      tpot: mean time between a request's tokens. itl: single gaps between them.
      e2e: arrival to last token, of complete ones.
      goodput: complete requests within their targets, a second.
      refused: by reason.
    """

    num_requests: int
    complete: int
    within_targets: int
    goodput: float
    output_tokens: int
    refused: dict[str, int]
    ttft: dict[int, float]
    tpot: dict[int, float]
    itl: dict[int, float]
    e2e: dict[int, float]


@dataclass(frozen=True, slots=True)
class PassSummary:
    """A whole pass; `by_class` holds only classes that have requests."""

    seconds: float
    steps: int
    preemptions: int
    total: Latencies
    by_class: dict[str, Latencies]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(result: Drive) -> PassSummary:
    """The percentiles of a pass."""
    by_class = {
        kind.value: _latencies(found, result.seconds)
        for kind in ServiceClass
        if (found := [entry for entry in result.requests if entry.request.service_class is kind])
    }
    total = _latencies(result.requests, result.seconds)
    return PassSummary(result.seconds, result.steps, result.preemptions, total, by_class)


def table(summary: PassSummary) -> str:
    """For people: a line for each class and measure."""
    total = summary.total
    parts = {"all": total, **(summary.by_class if len(summary.by_class) > 1 else {})}
    lines = [
        f"{total.num_requests} requests in {summary.seconds:.1f} s: {total.output_tokens / summary.seconds:.1f} output "
        f"tokens/s, {summary.steps} steps, {summary.preemptions} preemptions",
        "",
        *percentile_lines(parts),
        "",
    ]
    for name, part in parts.items():
        refused = ", ".join(f"{count} refused ({reason})" for reason, count in sorted(part.refused.items()))
        lines.append(
            f"{name}: {part.num_requests} requests, {part.complete} complete, {part.within_targets} within their "
            f"targets (goodput {part.goodput:.3f}/s){', ' + refused if refused else ''}"
        )
    return "\n".join(lines)


def percentile_lines(parts: Mapping[str, Latencies]) -> list[str]:
    """A header, and a line for each part and measure that there is."""
    lines = [f"{'':24}" + "".join(f"{f'P{percent}':>12}" for percent in PERCENTS)]
    for name, part in parts.items():
        for measure in MEASURES:
            values = getattr(part, measure)
            if values:
                cells = "".join(f"{_seconds(values[percent]):>12}" for percent in PERCENTS)
                lines.append(f"{f'{name} {measure.upper()}':24}{cells}")
    return lines


def percentiles(values: Iterable[float]) -> dict[int, float]:
    """By percent; empty for no values."""
    found = np.fromiter(values, float)
    if not found.size:
        return {}
    return dict(zip(PERCENTS, np.percentile(found, PERCENTS).tolist(), strict=True))


def _latencies(entries: Sequence[RequestTimes], seconds: float) -> Latencies:
    within = sum(entry.meets_targets for entry in entries)
    return Latencies(
        num_requests=len(entries),
        complete=sum(entry.is_complete for entry in entries),
        within_targets=within,
        goodput=within / seconds if seconds else 0.0,
        output_tokens=sum(choice.num_tokens for entry in entries for choice in entry.choices),
        refused=dict(Counter(entry.refusal for entry in entries if entry.refusal is not None)),
        ttft=percentiles(value for entry in entries if (value := entry.ttft) is not None),
        tpot=percentiles(value for entry in entries if (value := entry.tpot) is not None),
        itl=percentiles(gap for entry in entries for choice in entry.choices for gap in choice.gaps),
        e2e=percentiles(value for entry in entries if (value := entry.e2e) is not None),
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
