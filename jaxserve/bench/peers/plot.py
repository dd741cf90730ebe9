"""One picture of a comparison: a panel a figure, a bar a peer, dots for the single passes."""

from __future__ import annotations

from pathlib import Path

from jaxserve.bench.peers.compare import Comparison
from jaxserve.bench.peers.report import ROWS, heading
from jaxserve.bench.picture import new_figure, save

_PANELS = (
    "output throughput",
    "time to first token, P50",
    "time to first token, P99",
    "inter-token, P50",
    "inter-token, P99",
    "... while prompts arrive, P99",
)


def plot(comparison: Comparison, path: Path) -> None:
    """Write the picture; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or does not know the format.
    """
    figure = new_figure(width=10, height=2.2 + 0.7 * len(comparison.results))
    rows = {row.name: row for row in ROWS}
    names = [result.peer.name for result in comparison.results]
    for axes, panel in zip(figure.subplots(2, 3, sharey=True).flat, _PANELS, strict=True):
        row = rows[panel]
        for position, result in enumerate(comparison.results):
            middle = result.median(row.value)
            if middle is None:
                axes.text(0, position, " none", va="center", color="tab:red")
                continue
            (bar,) = axes.barh(position, middle * row.scale, color=f"C{position % 10}", alpha=0.75)
            axes.bar_label(axes.containers[-1], fmt=f"%.{row.digits}f", padding=3, fontsize=8)
            values = [row.value(one.figures) for one in result.passes if one.figures is not None]
            dots = [value * row.scale for value in values if value is not None]
            axes.plot(dots, [position] * len(dots), "k|", markersize=bar.get_height() * 10)
        axes.set_title(row.label, fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
    figure.axes[0].invert_yaxis()  # shared: the first peer on top everywhere
    figure.suptitle(heading(comparison), fontsize=9)
    save(figure, path)
