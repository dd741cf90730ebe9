"""A measurement as text, JSON and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.picture import new_figure, save
from jaxserve.bench.pressure.outcome import Outcome
from jaxserve.bench.pressure.run import Pressure

_HEADINGS = (
    "load",
    "offered/s",
    "goodput/s",
    "tokens/s",
    "TTFT P50",
    "P99",
    "refused",
    "in",
    "bg TTFT P99",
    "bg whole",
    "in time",
)


def report(result: Pressure) -> str:
    """A table for each policy. Times in seconds; `bg` is the background class, the rest interactive requests."""
    targets = result.plan.targets
    lines = [
        "",
        f"capacity {result.capacity:.2f} requests/s; interactive requests are good within a TTFT of "
        f"{_seconds(targets.ttft_seconds)} and {_seconds(targets.itl_seconds)} between tokens; "
        f"{result.plan.background_share:.0%} are background; requests come for {result.plan.seconds:g} s",
    ]
    for policy, outcomes in result.outcomes.items():
        lines += ["", policy, "".join(f"{name:>12}" for name in _HEADINGS)]
        lines += ["".join(f"{cell:>12}" for cell in _row(load, one)) for load, one in outcomes.items()]
        for load, one in outcomes.items():
            did = ", ".join(f"{name} {value:g}" for name, value in one.counts.items() if value)
            lines.append(f"  {load:g}x: {did or 'no preemption, promotion or refusal'}")
    return "\n".join(lines)


def _row(load: float, one: Outcome) -> tuple[str, ...]:
    inter, back = one.interactive, one.background
    return (
        f"{load:g}x",
        f"{one.offered:.2f}",
        f"{one.goodput:.2f}",
        f"{one.output_throughput:.1f}",
        _number(inter.ttft_p50),
        _number(inter.ttft_p99),
        f"{inter.refused}/{inter.sent}",
        "" if inter.refusal_p99 is None else f"{1e3 * inter.refusal_p99:.0f} ms",
        _number(back.ttft_p99),
        f"{back.whole}/{back.sent}",
        f"{back.in_time}",
    )


def to_json(result: Pressure) -> dict[str, object]:
    """Everything, with what it depends on."""
    return {
        "benchmark": "pressure",
        **describe_environment(),
        "plan": asdict(result.plan),
        "capacity": result.capacity,
        "outcomes": {
            policy: {f"{load:g}": {**asdict(one), "goodput": one.goodput} for load, one in outcomes.items()}
            for policy, outcomes in result.outcomes.items()
        },
    }


def plot(result: Pressure, path: Path) -> None:
    """Goodput and TTFT against load; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or does not know the format.
    """
    figure = new_figure(width=11, height=3.6)
    good, ttft, background = figure.subplots(1, 3)
    for policy, outcomes in result.outcomes.items():
        loads = list(outcomes)
        good.plot(loads, [one.goodput for one in outcomes.values()], "o-", label=policy)
        ttft.plot(loads, [one.interactive.ttft_p99 for one in outcomes.values()], "o-", label=policy)
        background.plot(loads, [one.background.ttft_p99 for one in outcomes.values()], "o-", label=policy)
    if result.plan.targets.ttft_seconds is not None:
        ttft.axhline(result.plan.targets.ttft_seconds, color="k", linestyle="--", label="target")
    good.set_ylabel("interactive requests a second within targets")
    ttft.set_ylabel("interactive TTFT P99 of those served, s")
    background.set_ylabel("background TTFT P99, s")
    ttft.set_yscale("log")
    for axes in (good, ttft, background):
        axes.set_xlabel("offered load, as a multiple of capacity")
        axes.legend(fontsize=8)
    good.set_ylim(bottom=0)
    save(figure, path)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "any" if value is None else f"{value:g} s"
