"""Passes of a workload beside each other: how latencies are distributed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxserve.bench.picture import new_figure, save
from jaxserve.simulation.drive import Drive


def plot_latencies(passes: Mapping[str, Drive], path: Path) -> None:
    """Write the picture; the suffix of `path` decides the format.

    Args:
      passes: by name, for the legend.

    Raises:
      ConfigError: matplotlib is missing, or there is no such format.
    """
    figure = new_figure(width=10, height=3.4)
    panels = figure.subplots(1, 3)
    for axes, (name, values_of) in zip(
        panels,
        (
            ("time to first token (s)", lambda entry: [entry.ttft]),
            (
                "between two tokens (s)",
                lambda entry: [gap for choice in entry.choices for gap in choice.gaps],
            ),
            ("whole answer (s)", lambda entry: [entry.e2e]),
        ),
        strict=True,
    ):
        for label, result in passes.items():
            values = sorted(v for entry in result.requests for v in values_of(entry) if v is not None)
            if values:
                axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label)
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests at most that long")
    panels[0].legend()
    save(figure, path)
