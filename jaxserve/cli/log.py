"""What commands that run an engine log: warnings, and the few lines that say how it starts."""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import Any

_TOLD = (
    "pallas_kernels",  # which attention backend runs
    "jaxserve.memory",  # what it is for
    "jaxserve.executables",  # why programs are compiled again
    "jaxserve.programs",  # when all of them are ready
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class OneLineFormatter(logging.Formatter):
    """Text of others in a message can neither begin a line of its own nor steer a terminal.

    A message is one line, with control characters escaped; a traceback's lines come indented below it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | Any,
    ) -> str:
        return "\n".join("  " + _escaped(line) for line in super().formatException(ei).split("\n"))


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def show_log() -> None:
    """On stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in _TOLD:
        logging.getLogger(name).setLevel(logging.INFO)
