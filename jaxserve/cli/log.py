"""What commands that run an engine log: warnings, and the few lines that say how it starts."""

from __future__ import annotations

import logging

_TOLD = (
    "pallas_kernels",  # which attention backend runs
    "jaxserve.memory",  # what it is for
    "jaxserve.executables",  # why programs are compiled again
    "jaxserve.programs",  # when all of them are ready
)


def show_log() -> None:
    """On stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for name in _TOLD:
        logging.getLogger(name).setLevel(logging.INFO)
