"""When the tokens of each sequence came, and what that says of how requests fare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.goodput import count_end, count_promise
from jaxserve.outputs import RequestUpdate
from jaxserve.recent_times import RecentTimes
from jaxserve.request import FinishReason, Request
from jaxserve.stats import EngineStats


@dataclass(slots=True)
class _Followed:
    """A sequence; `promised`: its first token was predicted to come in time."""

    request: Request
    promised: bool


@dataclass(slots=True)
class _Group:
    """A request's choices that have not ended, and the most tokens that one of the others has."""

    open: int = 0
    longest: int = 0


class LatencyMeter:
    """Fills in `EngineStats.requests`, the goodput, and the token times of `Request`.

    Times are seconds of the engine's clock. Used by the engine's thread.

    Attributes:
      recent: where times to first token, and times between tokens, are kept as well while somebody watches.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self.recent: tuple[RecentTimes, RecentTimes] | None = None
        self._followed: dict[str, _Followed] = {}
        self._groups: dict[str, _Group] = {}

    def add(self, request: Request, *, promised: bool) -> None:
        """Follow a sequence that has been queued."""
        self._followed[request.request_id] = _Followed(request, promised)
        self._groups.setdefault(request.group_id, _Group()).open += 1

    def tokens(self, updates: Iterable[RequestUpdate], now: float) -> None:
        """Tokens have come."""
        observe_gap = self._stats.requests.between_tokens.observe
        for update in updates:
            request, num_tokens = update.request, len(update.new_token_ids)
            if not num_tokens or request.request_id not in self._followed:
                continue
            last, request.last_token_time = request.last_token_time, now
            if last is None:
                self._first_token(request, now)
            else:
                gap = (now - last) / num_tokens
                observe_gap(gap, num_tokens)
                if self.recent:
                    self.recent[1].add(gap, now, num_tokens)

    def ended(self, request_id: str, reason: FinishReason, num_tokens: int) -> None:
        """A sequence has ended, with so many tokens in its output."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        request = followed.request
        count_end(self._stats, request, reason, num_tokens)
        stats = self._stats.requests
        stats.prompt_tokens.observe(request.num_prompt_tokens)
        stats.generation_tokens.observe(num_tokens)
        stats.max_tokens.observe(request.max_tokens)
        self._phases(request, num_tokens)
        group = self._groups[request.group_id]
        group.open -= 1
        group.longest = max(group.longest, num_tokens)
        if not group.open:
            del self._groups[request.group_id]
            stats.longest_generation.observe(group.longest)
            stats.choices.observe(request.params.n)

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        self._stats.requests.first_token.observe(now - request.arrival_time)
        if self.recent:
            self.recent[0].add(now - request.arrival_time, now)
        if self._followed[request.request_id].promised:
            count_promise(self._stats, request)

    def _phases(self, request: Request, num_tokens: int) -> None:
        stats, scheduled = self._stats.requests, request.scheduled_time
        if scheduled is None:
            return
        stats.queue.observe(scheduled - request.arrival_time)
        first, last = request.first_token_time, request.last_token_time
        if first is None or last is None:
            return
        stats.prefill.observe(first - scheduled)
        stats.decode.observe(last - first)
        stats.inference.observe(last - scheduled)
        if num_tokens > 1:
            stats.per_output_token.observe((last - first) / (num_tokens - 1))
