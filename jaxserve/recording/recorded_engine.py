"""An EngineCore that writes down what happens to it and what it does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.config import EngineConfig
from jaxserve.engine import EngineCore, Runner
from jaxserve.errors import OverloadedError
from jaxserve.outputs import ModelRunnerOutput, RequestOutput
from jaxserve.recording.costs_file import costs_of, write_costs
from jaxserve.recording.engine_description import describe_engine
from jaxserve.recording.event_writer import EventWriter
from jaxserve.recording.events import (
    VERSION,
    Abort,
    AnyEvent,
    End,
    Header,
    Step,
    Submit,
    TurnedAway,
    plan_record,
    refusal,
    result_record,
)
from jaxserve.recording.tape import SteadyBuckets, Tape, TapedProposer, TapedRunner
from jaxserve.request import GenerationRequest
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What to record, and what a replay must know to make the same engine.

    Attributes:
      events: written to as things happen; None records none.
      costs: file for what steps cost, written when the engine is closed; None writes none.
      model, options: what the engine is made of.
    """

    events: EventWriter | None
    costs: Path | None
    model: str
    options: EngineConfig


class RecordedEngine(EngineCore):
    """Records every input and decision. Takes what `EngineCore` does, and `recording`."""

    def __init__(
        self,
        *,
        recording: RecordingOptions,
        runner: Runner,
        buckets: ShapeBuckets | ReadyBuckets,
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
        **parts: Any,
    ) -> None:
        self._recording = recording
        self._tape = Tape(clock)
        self._steady = SteadyBuckets(buckets)
        self._num_events = 0
        self._turned_away: deque[tuple[GenerationRequest, float, str]] = deque()  # by other threads
        self._turned_away_last = ""
        self._is_closed = False
        super().__init__(
            runner=TapedRunner(runner, self._tape),
            buckets=self._steady,
            clock=self._tape.now,
            proposer=None if proposer is None else TapedProposer(proposer, self._tape),
            **parts,
        )
        if isinstance(buckets, ReadyBuckets):
            self.stats.shapes = buckets.progress  # as of now, not of the last event
        if recording.events is not None:
            options = msgspec.to_builtins(recording.options)
            recording.events.begin(Header(VERSION, describe_engine(self), recording.model, options))

    def check_admission(self, request: GenerationRequest, now: float) -> None:
        try:
            super().check_admission(request, now)
        except OverloadedError as error:
            if request.request_id != self._turned_away_last:  # batches try again and again
                self._turned_away_last = request.request_id
                self._turned_away.append((request, now, refusal(error)))
            raise

    def submit(self, request: GenerationRequest) -> None:
        begun = self._begin()
        refused = None
        try:
            super().submit(request)
        except Exception as error:
            refused = refusal(error)
            raise
        finally:
            self._add(
                partial(Submit, **begun, clock=tuple(self._tape.clock), request=request, refused=refused)
            )

    def abort(self, request_id: str) -> None:
        begun = self._begin()
        self._tape.now()  # for who wants to know when the client went away; the engine does not ask
        super().abort(request_id)
        self._add(partial(Abort, **begun, clock=tuple(self._tape.clock), request_id=request_id))

    def step(self) -> list[RequestOutput]:
        begun = self._begin()
        raised = None
        try:
            return super().step()
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            tape = self._tape
            self._add(
                partial(
                    _step_event,
                    begun,
                    tuple(tape.clock),
                    tuple(tape.done),
                    tape.launched,
                    tape.result,
                    tape.fault,
                    raised,
                )
            )

    def close(self) -> None:
        super().close()
        if self._is_closed:
            return
        self._is_closed = True
        recording = self._recording
        if recording.events is not None:
            recording.events.add(partial(End, **self._begin()))
            recording.events.close()
        if recording.costs is not None:
            write_costs(recording.costs, costs_of(self))

    def _begin(self) -> dict[str, Any]:
        while self._turned_away:
            request, at, refused = self._turned_away.popleft()
            number, self._num_events = self._num_events, self._num_events + 1
            self._add(partial(TurnedAway, number=number, request=request, at=at, refused=refused))
        self._tape.clear()
        self._num_events += 1
        return {"number": self._num_events - 1, "ready": self._steady.follow()}

    def _add(self, make: Callable[[], AnyEvent]) -> None:
        if self._recording.events is not None:
            self._recording.events.add(make)


def _step_event(
    begun: dict[str, Any],
    clock: tuple[float, ...],
    done: tuple[bool, ...],
    launched: tuple[SchedulerOutput, HostBatch] | None,
    result: ModelRunnerOutput | None,
    fault: tuple[str, str] | None,
    raised: str | None,
) -> Step:
    return Step(
        **begun,
        clock=clock,
        done=done,
        plan=None if launched is None else plan_record(launched[0], launched[1].bucket),
        result=None if result is None else result_record(result),
        fault=fault,
        raised=raised,
    )


def recording_options(model: str | Path, options: EngineConfig) -> RecordingOptions | None:
    """What `options` ask to record; None for nothing.

    Raises:
      ConfigError: a file can't be written.
    """
    if options.record is None and options.record_costs is None:
        return None
    events = EventWriter(Path(options.record)) if options.record is not None else None
    costs = Path(options.record_costs) if options.record_costs is not None else None
    return RecordingOptions(events, costs, str(model), options)
