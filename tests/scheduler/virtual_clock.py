"""Runs the real scheduler against a clock that steps advance by what they are said to take, with no device at all."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.errors import OverloadedError
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import Request
from jaxserve.scheduler.factory import create_scheduler
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.scheduler.step_time import StepTimeModel, StepWork, work_of
from jaxserve.stats import EngineStats
from tests.fakes import make_config

# Seconds for each feature of a step: 1, tokens, sequences, decode keys, prefill pairs.
WEIGHTS = (0.02, 1e-3, 2e-4, 1e-6, 3e-7)


def step_seconds(work: StepWork) -> float:
    features = (1, work.tokens, work.seqs, work.decode_keys, work.prefill_pairs)
    return sum(weight * feature for weight, feature in zip(WEIGHTS, features, strict=True))


def exact_step_times() -> StepTimeModel:
    """A model that knows `step_seconds`."""
    value = {"num_steps": 1000, "weights": WEIGHTS, "factors": [], "recent": []}
    return StepTimeModel.from_dict(value, lambda tokens, seqs: (tokens, seqs))


class VirtualRun:
    """
    Attributes:
      now: seconds.
      order: request ids in the order of their first steps.
      started_at: when that was; ttfts: seconds from arrival to the first token; gaps: seconds between tokens; by id.
      predicted: seconds from arrival, of requests that were taken; refused: what was raised; by id.
    """

    def __init__(self, num_blocks: int = 400, **config: object) -> None:
        self.config = make_config(**{"enable_prefix_caching": False, "block_size": 16, **config})
        self.scheduler = create_scheduler(self.config, num_blocks, exact_step_times())
        self.now = 0.0
        self.order: list[str] = []
        self.started_at: dict[str, float] = {}
        self.ttfts: dict[str, float] = {}
        self.gaps: dict[str, list[float]] = {}
        self.predicted: dict[str, float] = {}
        self.refused: dict[str, OverloadedError] = {}
        self._last_token: dict[str, float] = {}

    def add(self, *requests: Request, arrival: float | None = None) -> bool:
        """Queue all sequences of a request, that arrived now unless told otherwise; False when it is refused."""
        for request in requests:
            request.arrival_time = self.now if arrival is None else arrival
        name = requests[0].request_id
        try:
            self.scheduler.add(*requests, now=self.now)
        except OverloadedError as error:
            self.refused[name] = error
            return False
        expected = self.scheduler._ttfts._expected.get(name)
        if expected is not None:
            self.predicted[name] = expected.predicted
        return True

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(self.now)
        if plan.step_id % 16 == 0:  # costs far more than the step
            self.scheduler.check_integrity()
        for row in plan.scheduled:
            if row.request_id not in self.started_at:
                self.started_at[row.request_id] = self.now
                self.order.append(row.request_id)
        self.now += step_seconds(work_of(plan.scheduled))
        result = ModelRunnerOutput({row.request_id: [7] for row in plan.scheduled if row.samples})
        updates = self.scheduler.update_from_output(plan, result)
        self.scheduler.note_first_tokens(updates, self.now)
        for update in updates:
            request_id = update.request.request_id
            if update.new_token_ids:
                self.ttfts.setdefault(request_id, self.now - update.request.arrival_time)
                if request_id in self._last_token:
                    self.gaps.setdefault(request_id, []).append(self.now - self._last_token[request_id])
                self._last_token[request_id] = self.now
        return plan

    def run(self, arrivals: Iterable[tuple[float, Request]] = ()) -> None:
        """Let requests come at their times, and step until all have ended."""
        due = sorted(arrivals, key=lambda pair: pair[0])[::-1]  # as given, where times are equal
        while due or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                self.now = max(self.now, due[-1][0])
            while due and due[-1][0] <= self.now:
                arrival, request = due.pop()
                self.add(request, arrival=arrival)
            if self.scheduler.has_unfinished:
                self.step()

    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.scheduler.fill_stats(stats)
        return stats
