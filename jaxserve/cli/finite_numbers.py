"""No command takes `nan` or `inf`, which Python reads as numbers, for any of its options."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from jaxserve.errors import ConfigError


def finite_numbers[**P, R](command: Callable[P, R]) -> Callable[P, R]:
    """The same command; it raises ConfigError, with the option's name, when a number given to it is not finite."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--{name.replace('_', '-')} must be a finite number, got {value:g}")
        return command(*args, **kwargs)

    return checked
