"""Text of clients and command lines as numbers: plain decimal ones.

Python's own `int` and `float` take more: `1_0`, digits of other scripts, blanks, `nan`, `inf`.
"""

from __future__ import annotations

import math
import re

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,4})?")


def parse_int(text: str) -> int:
    """Raises ValueError with what is wrong, for people."""
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is not an integer")
    return int(text)


def parse_float(text: str) -> float:
    """A finite number. Raises ValueError with what is wrong, for people."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]!r} is not a finite decimal number")
    return value
