"""What the commands of `scripts/bench` share: checks of their arguments, and lines for whoever waits."""

from __future__ import annotations

import argparse
import sys

from jaxserve.plain_numbers import parse_float, parse_int


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
    try:
        value = parse_float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def integer(text: str) -> int:
    """Raises as argparse wants it."""
    try:
        return parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least(least: int, text: str) -> int:
    value = integer(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value
