"""Results for people, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.environment import describe_host
from jaxserve.bench.picture import new_figure, save
from jaxserve.bench.serve.goal import Goal
from jaxserve.bench.serve.measure import Measured
from jaxserve.simulation.latencies import percentile_lines
from jaxserve.workload.traced_request import Workload

_SWEEP_COLUMNS = (
    "output tokens/s",
    "goodput requests/s",
    "ttft P50 ms",
    "ttft P99 ms",
    "tpot P50 ms",
    "itl P99 ms",
    "e2e P99 ms",
)


def result_of(
    benchmark: str, workload: Workload, server: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON-ready: what was measured, on what, and where the client ran.

    Args:
      benchmark: "serve", "sweep" or "throughput".
      server: what is known of it.
      found: `figures`, or `points` with figures each.
    """
    return {
        "benchmark": benchmark,
        **describe_host(),
        "server": dict(server),
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
        },
        **found,
    }


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Nowhere, for None."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def describe(measured: Measured) -> str:
    """One load, for the terminal."""
    figures, found = measured.figures(), measured.latencies
    lines = [
        f"{measured.load.describe()}: {found.complete} of {found.num_requests} requests complete in "
        f"{measured.seconds:.1f} s; {figures['output tokens/s']:.1f} output tokens/s, "
        f"{figures['total tokens/s']:.1f} with prompts, {figures['requests/s']:.2f} requests/s",
        "",
        *percentile_lines({"": found}),
        "",
        f"goodput {found.goodput:.3f} requests/s: {found.within_targets} {_kept(measured.goal)}",
    ]
    return "\n".join([*lines, *fault_lines([measured])])


def _kept(goal: Goal) -> str:
    return "whole" if goal == Goal() else f"within {goal}"


def describe_sweep(points: Sequence[Measured]) -> str:
    """A line for each load."""
    width = max(len(point.load.describe()) for point in points)
    lines = [" " * width + "".join(f"  {name:>18}" for name in _SWEEP_COLUMNS)]
    for point in points:
        figures = point.figures()
        cells = (f"{figures[name]:.2f}" if name in figures else "-" for name in _SWEEP_COLUMNS)
        lines.append(point.load.describe().ljust(width) + "".join(f"  {cell:>18}" for cell in cells))
    return "\n".join([*lines, *fault_lines(points)])


def describe_figures(figures: Mapping[str, float]) -> str:
    """A line each."""
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {value:>12.3f}" for name, value in figures.items())


def fault_lines(points: Sequence[Measured]) -> list[str]:
    """What went wrong, a line for each kind and load."""
    lines = [
        f"(!) {point.load.describe()}: {fault.count} of {point.latencies.num_requests} answers: {fault.kind} "
        f"(the first: {fault.first})"
        for point in points
        for fault in point.faults
    ]
    return ["", *lines] if lines else []


def plot(points: Sequence[Measured], path: Path) -> None:
    """Throughput, goodput and latencies over the loads; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or there is no such format.
    """
    panels = (
        ("tokens a second", ("output tokens/s",)),
        ("requests a second", ("requests/s", "goodput requests/s")),
        ("time to first token, ms", ("ttft P50 ms", "ttft P99 ms")),
        ("between tokens, ms", ("tpot P50 ms", "tpot P99 ms", "itl P99 ms")),
    )
    figure = new_figure(width=11, height=6)
    places, labels = range(len(points)), [_short(point) for point in points]
    all_figures = [point.figures() for point in points]
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for name in names:
            axes.plot(places, [one.get(name, float("nan")) for one in all_figures], "o-", label=name)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(places, labels, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, path)


def _short(point: Measured) -> str:
    load = point.load
    rate = f"{load.rate:g}/s" if load.rate is not None else "all" if load.recorded is None else "recorded"
    return rate if load.concurrency is None else f"{rate}, {load.concurrency}"
