"""A recording through an engine again: the same inputs at the same steps, and whether it does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.engine import EngineCore, Runner
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.recording.events import (
    Abort,
    AnyEvent,
    End,
    Plan,
    Result,
    Row,
    Step,
    Submit,
    plan_record,
    refusal,
    result_record,
)
from jaxserve.recording.runner_proxy import RunnerProxy
from jaxserve.scheduler.output import DraftRequest, SchedulerOutput
from jaxserve.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first does something else.

    Attributes:
      event: number of the recorded event.
      step: calls of `step` before; request: whose, where it is one's.
    """

    event: int
    step: int
    request: str | None
    what: str

    def __str__(self) -> str:
        whose = f", request {self.request}" if self.request else ""
        return f"step {self.step} (event {self.event}){whose}: {self.what}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What was replayed.

    Attributes:
      is_whole: the recording goes on to where its engine was closed.
      difference: None where there is none.
    """

    steps: int
    requests: int
    tokens: int
    is_whole: bool
    difference: Difference | None


class ReplayedEngine(EngineCore):
    """An engine whose clock, ready shapes and device faults come from a recording. Takes what `EngineCore` does."""

    def __init__(
        self,
        *,
        runner: Runner,
        buckets: ShapeBuckets | ReadyBuckets,
        proposer: Proposer | None = None,
        **parts: Any,
    ) -> None:
        self._clock_values = _RecordedClock()
        self._device = _ComparingRunner(runner)
        self._shapes = ReadyBuckets(buckets.planned if isinstance(buckets, ReadyBuckets) else buckets)
        parts["clock"] = self._clock_values
        replayed = None if proposer is None else _ReplayedProposer(proposer, self._device)
        super().__init__(runner=self._device, buckets=self._shapes, proposer=replayed, **parts)

    def play(self, event: AnyEvent) -> str | tuple[str, str] | None:
        """Do once more what was recorded; returns what is different, with the request where it is one's."""
        self._clock_values.load(event.clock)
        for tokens, seqs in event.ready:
            self._shapes.mark(Bucket(tokens, seqs, self._shapes.blocks))
        if isinstance(event, Submit):
            return self._play_submit(event)
        if isinstance(event, Abort):
            self.abort(event.request_id)
        elif isinstance(event, Step):
            return self._play_step(event)
        return None

    def _play_submit(self, event: Submit) -> tuple[str, str] | None:
        refused = None
        try:
            self.submit(event.request)
        except Exception as error:
            refused = refusal(error)
        if refused == event.refused:
            return None
        return (
            f"it is {refused or 'taken'}, recorded was {event.refused or 'taken'}",
            event.request.request_id,
        )

    def _play_step(self, event: Step) -> str | tuple[str, str] | None:
        raised = None
        self._device.expect(event)
        try:
            self.step()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        if self._device.difference is not None:
            return self._device.difference
        if (self._device.plan is None) != (event.plan is None):
            return f"{'nothing' if self._device.plan is None else 'a step'} is planned, unlike then"
        if (self._device.result is None) != (event.result is None):
            return f"{'no' if self._device.result is None else 'a'} result is read, unlike then"
        # A recorded fault of the device is raised by us, so its type is another one.
        if (raised is None) != (event.raised is None) or (raised != event.raised and event.fault is None):
            return f"it ends with {raised or 'no error'}, recorded was {event.raised or 'no error'}"
        return None


def replay_events(
    engine: ReplayedEngine,
    events: Iterable[AnyEvent],
    *,
    progress: Callable[[int], None] = lambda steps: None,
) -> ReplayReport:
    """Play events until the first difference.

    Args:
      engine: new, and like the recorded one.
      progress: told the number of steps now and then.

    Raises:
      ConfigError: a line of the recording is damaged.
    """
    steps = requests = tokens = 0
    is_whole = False
    for event in events:
        found = engine.play(event)
        if found is not None:
            what, request = found if isinstance(found, tuple) else (found, None)
            difference = Difference(event.number, steps, request, what)
            return ReplayReport(steps, requests, tokens, is_whole, difference)
        if isinstance(event, Step):
            steps += 1
            tokens += sum(map(len, event.result.tokens.values())) if event.result else 0
            if steps % 100 == 0:
                progress(steps)
        requests += isinstance(event, Submit)
        is_whole = isinstance(event, End)
    return ReplayReport(steps, requests, tokens, is_whole, None)


class _RecordedClock:
    def __init__(self) -> None:
        self._values: list[float] = [0.0]

    def load(self, values: Iterable[float]) -> None:
        self._values = [*reversed(list(values))] or self._values[-1:]

    def __call__(self) -> float:
        # An engine that asks more often than the recorded one did has other code; it stands still then.
        return self._values.pop() if len(self._values) > 1 else self._values[0]


class _ComparingRunner(RunnerProxy):
    """Runs what the engine plans, and compares plans and results with those recorded."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.expect(Step(number=0))

    def expect(self, event: Step) -> None:
        """What the coming call of `step` should do."""
        self._event = event
        self._done = list(reversed(event.done))
        self.plan: Plan | None = None
        self.result: Result | None = None
        self.difference: str | tuple[str, str] | None = None

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> Any:
        self.plan = plan_record(plan, batch.bucket)
        if self._event.plan is not None:
            self.difference = compare_plans(self.plan, self._event.plan)
        self.fail_as_recorded("launch")
        return self._runner.launch(plan, batch)

    def is_done(self, step: Any) -> bool:
        if self._done:
            return self._done.pop()
        self.fail_as_recorded("is_done")
        return self._runner.is_done(step)

    def read(self, step: Any) -> ModelRunnerOutput:
        self.fail_as_recorded("read")
        result = self._runner.read(step)
        if self._event.result is not None:  # measured times decide what is moved next, as the clock does
            result.transfers = self._event.result.transfers
        self.result = result_record(result)
        if self.difference is None and self._event.result is not None:
            self.difference = compare_results(self.result, self._event.result)
        return result

    def rebuild_state(self) -> None:
        if self._event.raised is not None:
            raise RuntimeError(f"as recorded: {self._event.raised}")
        super().rebuild_state()

    def fail_as_recorded(self, where: str) -> None:
        if self._event.fault is not None and self._event.fault[0] == where:
            raise RuntimeError(f"as recorded: {self._event.fault[1]}")


class _ReplayedProposer:
    """Fails where the recorded one did."""

    def __init__(self, proposer: Proposer, device: _ComparingRunner) -> None:
        self._proposer = proposer
        self._device = device
        self.uses_device = proposer.uses_device

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        self._device.fail_as_recorded("draft")
        return self._proposer.propose(wanted)

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


def compare_plans(actual: Plan, recorded: Plan) -> str | tuple[str, str] | None:
    """The first difference of two plans, with the request where it is one's; None where they are equal."""
    for mine, theirs in zip_longest(actual.rows, recorded.rows):
        if mine != theirs:
            return _row_difference(mine, theirs)
    for field in Plan.__struct_fields__:
        one, other = getattr(actual, field), getattr(recorded, field)
        if one != other:
            return f"{field} is {one}, recorded was {other}"
    return None


def compare_results(actual: Result, recorded: Result) -> str | tuple[str, str] | None:
    """The first sequence whose tokens, failures or logprobs differ, in the order of their ids."""
    for request_id in sorted({*actual.tokens, *recorded.tokens, *actual.failed, *recorded.failed}):
        for field in ("tokens", "failed"):
            one, other = getattr(actual, field).get(request_id), getattr(recorded, field).get(request_id)
            if one != other:
                return f"{field} {one}, recorded were {other}", request_id
    for name in ("logprobs", "prompt_logprobs"):
        ours, known = getattr(actual, name), getattr(recorded, name)
        for request_id in sorted({*ours, *known}):
            pairs = zip_longest(ours.get(request_id, ()), known.get(request_id, ()))
            for index, (mine, theirs) in enumerate(pairs):
                if mine != theirs:
                    return f"{name}[{index}] are {mine}, recorded were {theirs}", request_id
    return None


def _row_difference(mine: Row | None, theirs: Row | None) -> tuple[str, str]:
    if mine is None or theirs is None or mine.request_id != theirs.request_id:
        ours, known = (row.request_id if row else "nobody" for row in (mine, theirs))
        row = theirs or mine
        assert row is not None
        return f"{ours} is scheduled where {known} was", row.request_id
    for field in Row.__struct_fields__:
        one, other = getattr(mine, field), getattr(theirs, field)
        if one != other:
            return f"{field} is {one}, recorded was {other}", mine.request_id
    raise AssertionError("rows that differ have a field that does")
