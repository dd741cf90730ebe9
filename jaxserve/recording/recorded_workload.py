"""A recording as a workload: what arrived when, and how long the answers were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.outputs import BlockTransfers
from jaxserve.recording.events import Abort, AnyEvent, Plan, Step, Submit, TurnedAway
from jaxserve.request import GenerationRequest
from jaxserve.scheduler.step_time import StepTimeModel, StepWork, work_of_rows
from jaxserve.workload.traced_request import TracedRequest, Workload


@dataclass(slots=True)
class _Seen:
    """A request, when it came, and what became of it. Seconds of the recorded clock."""

    request: GenerationRequest
    arrival: float
    num_tokens: dict[str, int] = field(default_factory=dict)  # of each choice
    first_token: float | None = None
    aborted: float | None = None


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """What can be learned from a recording without a model.

    Attributes:
      workload: requests that were taken or refused for want of room, with the lengths that their answers had (1 for
        those without any token).
      ttfts: seconds from each one's arrival to its first token, None without one.
      step_times: learned from all steps.
      transfer_rates: bytes a second to host memory and back, over all that was moved; None where nothing was.
    """

    workload: Workload
    ttfts: tuple[float | None, ...]
    step_times: StepTimeModel
    transfer_rates: tuple[float, float] | None


def recorded_traffic(name: str, events: Iterable[AnyEvent], buckets: ShapeBuckets) -> RecordedTraffic:
    """Go through a recording.

    Raises:
      ConfigError: a line of it is damaged.
    """
    step_times = StepTimeModel(buckets.round_up)
    seen: list[_Seen] = []
    unfinished: dict[str, _Seen] = {}  # by request id; the newest of those that had it
    turned_away: dict[str, _Seen] = {}  # by request id
    launched: deque[Plan] = deque()  # and not read
    moved = BlockTransfers()
    for event in events:
        if isinstance(event, TurnedAway):
            if event.request.request_id not in turned_away:  # it may have been tried again and again
                arrival = event.request.arrival_time
                entry = _Seen(event.request, event.at if arrival is None else arrival)
                turned_away[event.request.request_id] = entry
                seen.append(entry)
        elif isinstance(event, Submit) and event.request.request_id in turned_away:
            unfinished[event.request.request_id] = turned_away[event.request.request_id]
        elif isinstance(event, Submit):
            if event.refused is None or event.refused.startswith(("QueueFullError", "OverloadedError")):
                time = event.clock[0] if event.clock else event.request.arrival_time or 0.0
                entry = _Seen(
                    event.request, time if event.request.arrival_time is None else event.request.arrival_time
                )
                seen.append(entry)
                unfinished[event.request.request_id] = entry
        elif isinstance(event, Abort):
            if (aborted := unfinished.get(event.request_id)) is not None and event.clock:
                aborted.aborted = event.clock[0]
        elif isinstance(event, Step):
            if event.plan is not None:
                launched.append(event.plan)
            if event.fault is not None:
                launched.clear()
            if event.result is not None:
                moved = moved + event.result.transfers
            if event.result is not None and launched:
                _count_tokens(event, unfinished)
                elapsed, due = event.clock[-1] - event.clock[0], launched.popleft()
                if elapsed > 0:
                    step_times.observe(_work(due), elapsed)
    start = min((entry.arrival for entry in seen), default=0.0)
    seen.sort(key=lambda entry: entry.arrival)
    return RecordedTraffic(
        Workload(name, tuple(_traced(entry, start) for entry in seen)),
        tuple(None if e.first_token is None else e.first_token - e.arrival for e in seen),
        step_times,
        moved.rates,
    )


def _count_tokens(event: Step, unfinished: dict[str, _Seen]) -> None:
    assert event.result is not None
    for sequence, tokens in event.result.tokens.items():
        entry = unfinished.get(sequence.rpartition(":")[0])
        if entry is not None:
            entry.num_tokens[sequence] = entry.num_tokens.get(sequence, 0) + len(tokens)
            if entry.first_token is None:
                entry.first_token = event.clock[-1]


def _work(plan: Plan) -> StepWork:
    rows = ((row.start, row.count, len(row.draft_token_ids)) for row in plan.rows)
    return work_of_rows(rows, beside=StepWork(plan.num_padding_tokens, 0))


def _traced(entry: _Seen, start: float) -> TracedRequest:
    request, params = entry.request, entry.request.params
    return TracedRequest(
        request.prompt_token_ids,
        max([1, *entry.num_tokens.values()]),
        entry.arrival - start,
        service_class=request.service_class,
        priority=request.priority,
        client=request.client,
        targets=request.targets,
        n=params.n,
        seed=params.seed,
        aborts_after=None if entry.aborted is None else max(entry.aborted - entry.arrival, 0.0),
    )
