"""Where models that have a name are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_store() -> Path:
    """The folder that `jaxserve pull` writes to and that model names are looked up in; it need not exist yet.

    In this order: $JAXSERVE_HOME; `checkpoints/` of the checkout that this package runs from;
    `jaxserve/checkpoints` in the user's data folder ($XDG_DATA_HOME, or ~/.local/share).
    """
    chosen = os.environ.get("JAXSERVE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / "checkpoints").is_dir():
        return checkout / "checkpoints"
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "jaxserve" / "checkpoints"
