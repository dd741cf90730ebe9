"""The picture of `growth`: a panel for each thing that is varied."""

from __future__ import annotations

from pathlib import Path

from jaxserve.bench.growth import CONTEXT, QUEUE, SEQUENCES, Growth
from jaxserve.bench.picture import new_figure, save


def plot(result: Growth, path: Path) -> None:
    """Write the picture; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or does not know the format.
    """
    figure = new_figure(width=11, height=3.6)
    for axes, sweep in zip(figure.subplots(1, 3), (SEQUENCES, CONTEXT, QUEUE), strict=True):
        points = [point for point in result.points if point.load.sweep == sweep]
        values = [point.load.value for point in points]
        if sweep != QUEUE:
            axes.plot(values, [point.step for point in points], "o-", label="step")
            axes.plot(values, [point.floor for point in points], "k--", label="floor: bytes and FLOPs")
        axes.plot(values, [point.host for point in points], "s-", color="tab:orange", label="host's part")
        others = {
            SEQUENCES: f"context {points[0].load.context}",
            CONTEXT: f"{points[0].load.sequences} sequences",
            QUEUE: f"{points[0].load.sequences} sequences run",
        }
        axes.set_xlabel(f"{sweep} ({others[sweep]})")
        axes.set_ylabel("milliseconds a step")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{result.model}, {result.config.dtype}: decode steps, medians of {result.repeats}", fontsize=9
    )
    save(figure, path)
