"""How large prefill chunks may be without stalling the streams beside them for longer than they can live with."""

from __future__ import annotations

from collections.abc import Callable

MIN_PREFILL_TOKENS = 16  # a step's budget is never cut below that, so prompts always advance


def largest_within(seconds: Callable[[int], float | None], limit: float, budget: int) -> int:
    """The largest budget of prompt tokens whose step stays within `limit`.

    Args:
      seconds: predicted time of the step with such a budget; None where nothing is known, which cuts nothing.
      limit: seconds between two tokens of the most demanding stream.
      budget: most tokens, returned where it fits.

    Returns:
      At least min(`MIN_PREFILL_TOKENS`, `budget`), whether that fits or not.
    """
    predicted = seconds(budget)
    if predicted is None or predicted <= limit:
        return budget
    low, high = min(MIN_PREFILL_TOKENS, budget), budget
    while high - low > 1:
        middle = (low + high) // 2
        predicted = seconds(middle)
        if predicted is None or predicted <= limit:
            low = middle
        else:
            high = middle
    return low
