"""Running a workload's arrivals through an engine, on a wall clock or on one that does not wait."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.engine import EngineCore
from jaxserve.errors import OverloadedError
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason
from jaxserve.workload.traced_request import TracedRequest, Workload


class Clock(Protocol):
    """Of the engine, in seconds."""

    def __call__(self) -> float: ...
    def sleep_until(self, moment: float) -> None: ...


class WallClock:
    """The real time, of `time.monotonic`."""

    def __call__(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(moment - time.monotonic(), 0.0))


@dataclass(slots=True)
class ChoiceTimes:
    """One choice of a request. Times are in seconds from the workload's start.

    Attributes:
      first_token, last_token: when the engine gave them out; None without any.
      gaps: between two outputs with tokens.
      finish_reason: None while it runs.
    """

    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, output: RequestOutput, now: float) -> None:
        if output.token_ids:
            if self.last_token is None:
                self.first_token = now
            else:
                self.gaps.append(now - self.last_token)
            self.last_token = now
            self.num_tokens += len(output.token_ids)
        self.finish_reason = output.finish_reason


@dataclass(slots=True)
class RequestTimes:
    """How a request fared. Times are in seconds from the workload's start.

    Attributes:
      finished: when its last choice ended, or it was refused; None where that has not happened.
      refusal: `OverloadedError.reason`.
    """

    request: TracedRequest
    choices: list[ChoiceTimes]
    finished: float | None = None
    refusal: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all choices ended of themselves."""
        ends = {choice.finish_reason for choice in self.choices}
        return self.refusal is None and ends <= {FinishReason.LENGTH, FinishReason.STOP}

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        firsts = [choice.first_token for choice in self.choices if choice.first_token is not None]
        return min(firsts) - self.request.arrival if firsts else None

    @property
    def e2e(self) -> float | None:
        """Seconds from its arrival to its last token, of complete ones."""
        return (
            self.finished - self.request.arrival if self.is_complete and self.finished is not None else None
        )

    @property
    def tpot(self) -> float | None:
        """Mean seconds between its tokens: of all choices, after each one's first token."""
        gaps = sum(sum(choice.gaps) for choice in self.choices)
        tokens = sum(max(choice.num_tokens - 1, 0) for choice in self.choices)
        return gaps / tokens if tokens else None

    @property
    def meets_targets(self) -> bool:
        """Complete, with TTFT and mean time between tokens (`tpot`) within its targets, if it has any."""
        ttft = self.ttft
        return self.is_complete and ttft is not None and self.request.targets.met_by(ttft, self.tpot)


@dataclass(frozen=True, slots=True)
class Drive:
    """A workload's pass through an engine.

    Attributes:
      requests: in the workload's order.
      seconds: from the first arrival until nothing was left.
      steps, preemptions: during it.
    """

    requests: tuple[RequestTimes, ...]
    seconds: float
    steps: int
    preemptions: int


def drive(engine: EngineCore, workload: Workload, clock: Clock, *, prefix: str = "r") -> Drive:
    """Submit every request when it arrives (between two steps), abort it when its client goes away, step until the end.

    Args:
      engine: idle, with that clock.
      prefix: of request ids.

    Raises:
      InvalidRequestError: a request that the engine could never run.
    """
    assert not engine.has_work(), "the engine is busy with something else"
    times = [RequestTimes(item, [ChoiceTimes() for _ in range(item.n)]) for item in workload.requests]
    by_id = {f"{prefix}{index}": entry for index, entry in enumerate(times)}
    leaving: list[tuple[float, str]] = []  # a heap of those whose clients will go away
    steps, preemptions = engine.stats.steps, engine.stats.preemptions
    started, coming = clock(), 0
    while True:
        now = clock() - started
        while coming < len(times) and times[coming].request.arrival <= now:
            entry, request_id = times[coming], f"{prefix}{coming}"
            coming += 1
            try:
                engine.submit(entry.request.request(request_id, started=started))
            except OverloadedError as error:
                entry.refusal, entry.finished = error.reason, clock() - started
                continue
            if entry.request.aborts_after is not None:
                heapq.heappush(leaving, (entry.request.arrival + entry.request.aborts_after, request_id))
        while leaving and leaving[0][0] <= now:
            engine.abort(heapq.heappop(leaving)[1])
        if engine.has_work():
            outputs = engine.step()
            now = clock() - started
            for output in outputs:
                entry = by_id[output.request_id]
                entry.choices[output.index].add(output, now)
                if all(choice.finish_reason is not None for choice in entry.choices):
                    entry.finished = now
        elif coming < len(times):
            clock.sleep_until(started + times[coming].request.arrival)
        else:
            break  # whoever would still go away has ended
    return Drive(
        tuple(times),
        clock() - started,
        engine.stats.steps - steps,
        engine.stats.preemptions - preemptions,
    )
