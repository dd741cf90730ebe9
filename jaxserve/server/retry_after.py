"""The `Retry-After` header: whole seconds, and not the same for all who were refused."""

from __future__ import annotations

import math
import random


def retry_after(seconds: float, source: random.Random) -> str:
    """`seconds` rounded up, and up to half as much on top (at least 1 s), so that not all come back at once."""
    least = max(1, math.ceil(seconds))
    return str(least + source.randint(0, max(1, least // 2)))
