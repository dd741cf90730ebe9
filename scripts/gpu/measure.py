"""Medians of repeated runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_SAMPLE_S = 0.03  # a sample holds as many calls as take about so long
_MOST_CALLS = 50
_SAMPLES = 7
_LONGEST_S = 3.0  # of all samples together: slow things get fewer


def median_seconds(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, launches: int = 1
) -> dict[str, float]:
    """Time of one launch.

    Calls are queued one behind the other and waited for together, so what the host does between them is hidden as long
    as it is shorter than the device's work.

    Args:
      call: starts work and returns something to wait for.
      wait: returns when it is done.
      launches: how often one call does what is measured.

    Returns:
      "seconds": the median; "least", "most": of the samples.
    """
    wait(call())  # compiles
    wait(call())
    started = time.perf_counter()
    wait(call())
    once = time.perf_counter() - started
    calls = max(1, min(_MOST_CALLS, int(_SAMPLE_S / max(once, 1e-7))))
    samples = max(1, min(_SAMPLES, int(_LONGEST_S / max(once * calls, 1e-7))))
    taken = []
    for _ in range(samples):
        started = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        taken.append((time.perf_counter() - started) / (calls * launches))
    return {"seconds": statistics.median(taken), "least": min(taken), "most": max(taken)}
