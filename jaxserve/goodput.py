"""Which requests got the latencies that they asked for. Fills in the fields of `EngineStats`, which say what counts."""

from __future__ import annotations

from jaxserve.request import FinishReason, Request
from jaxserve.stats import EngineStats


def count_promise(stats: EngineStats, request: Request) -> None:
    """The first token of a sequence has come, of which it was predicted that it would come in time."""
    if request.targets.met_by(_ttft(request), None):
        stats.ttft_promises_kept += 1
    else:
        stats.ttft_promises_missed += 1


def count_end(stats: EngineStats, request: Request, reason: FinishReason, num_tokens: int) -> None:
    """A sequence has ended, with so many tokens."""
    if reason is FinishReason.ABORT:
        return
    good = reason is not FinishReason.ERROR and _is_within_targets(request, num_tokens)
    counts = stats.within_targets if good else stats.outside_targets
    counts[request.service_class.value] += 1


def _ttft(request: Request) -> float:
    assert request.first_token_time is not None
    return request.first_token_time - request.arrival_time


def _is_within_targets(request: Request, num_tokens: int) -> bool:
    first, last = request.first_token_time, request.last_token_time
    if first is None or last is None:
        return True  # it wanted no tokens
    mean_itl = (last - first) / (num_tokens - 1) if num_tokens > 1 else None
    return request.targets.met_by(_ttft(request), mean_itl)
