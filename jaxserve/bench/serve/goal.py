"""What an answer must be like to count for goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench.peers.answer import Answer
from jaxserve.errors import ConfigError
from jaxserve.plain_numbers import parse_float

NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Goal:
    """Most milliseconds; None is any.

    Attributes:
      ttft: to the first token. tpot: between tokens, on average. e2e: to the end.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Only a whole answer is a good one."""
        if answer.fault is not None:
            return False
        seconds = {"ttft": answer.ttft, "tpot": answer.tpot, "e2e": answer.ended - answer.sent}
        return all(
            limit is None or value is None or value * 1000 <= limit
            for name, value in seconds.items()
            for limit in [getattr(self, name)]
        )

    def __str__(self) -> str:
        limits = [f"{name}:{getattr(self, name):g}" for name in NAMES if getattr(self, name) is not None]
        return " ".join(limits) or "none"


def parse_goal(texts: Sequence[str]) -> Goal:
    """`ttft:200`, `tpot:50`, `e2e:3000`, in milliseconds, each once; a text may hold several.

    Raises:
      ConfigError: one line that quotes what is wrong.
    """
    limits: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limit = parse_float(value)
        except ValueError:
            limit = math.nan
        if name not in NAMES or name in limits or not (math.isfinite(limit) and limit > 0):
            raise ConfigError(
                f"--goodput {part!r}: must be {', '.join(f'{known}:MILLISECONDS' for known in NAMES)}, each once"
            )
        limits[name] = limit
    return Goal(**limits)
