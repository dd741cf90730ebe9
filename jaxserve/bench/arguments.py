"""What the commands of `scripts/bench` share: checks of their arguments, and lines for whoever waits."""

from __future__ import annotations

import argparse
import math
import sys


def announce(line: str) -> None:
    """To stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An integer of at least 1; raises as argparse wants it."""
    return _at_least(1, text)


def at_least_0(text: str) -> int:
    """An integer of at least 0; raises as argparse wants it."""
    return _at_least(0, text)


def positive_number(text: str) -> float:
    """A finite number above 0; raises as argparse wants it."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
