"""Drawing, where matplotlib is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError


def require_matplotlib() -> None:
    """Raises ConfigError, with what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxserve[bench]'")


def new_figure(*, width: float, height: float) -> Any:
    """An empty matplotlib figure, sizes in inches; needs no display.

    Raises:
      ConfigError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write it; the suffix of `path` decides the format.

    Raises:
      ConfigError: no such format.
    """
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from error
