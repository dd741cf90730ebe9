"""What happens between an engine and the world during one event: its clock, its device, its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.engine import Runner
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.recording.runner_proxy import RunnerProxy
from jaxserve.scheduler.output import DraftRequest, SchedulerOutput
from jaxserve.speculative.proposer import Proposer


class SteadyBuckets(ReadyBuckets):
    """The ready shapes as of the last `follow`: what becomes ready in the middle of a step counts from the next on."""

    def __init__(self, source: ShapeBuckets | ReadyBuckets) -> None:
        super().__init__(source.planned if isinstance(source, ReadyBuckets) else source)
        self._source = source

    def follow(self) -> tuple[tuple[int, int], ...]:
        """Take over what has become ready; returns its (tokens, sequences)."""
        source = self._source
        if self.progress.ready == self.progress.total:
            return ()
        ready = source.ready() if isinstance(source, ReadyBuckets) else source.all_buckets()
        known = set(self.ready())
        new = [bucket for bucket in ready if bucket not in known]
        for bucket in new:
            self.mark(bucket)
        return tuple((bucket.tokens, bucket.seqs) for bucket in new)


class Tape:
    """The outside of one event, as the engine has seen it. `clear` begins the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self.clock: list[float] = []
        self.done: list[bool] = []
        self.launched: tuple[SchedulerOutput, HostBatch] | None = None
        self.result: ModelRunnerOutput | None = None
        self.fault: tuple[str, str] | None = None

    def now(self) -> float:
        """The engine's clock."""
        value = self._clock()
        self.clock.append(value)
        return value


class TapedRunner(RunnerProxy):
    """A runner whose every answer goes onto a tape."""

    def __init__(self, runner: Runner, tape: Tape) -> None:
        super().__init__(runner)
        self._tape = tape

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> Any:
        self._tape.launched = plan, batch
        try:
            return self._runner.launch(plan, batch)
        except Exception as error:
            self._tape.fault = "launch", f"{type(error).__name__}: {error}"
            raise

    def is_done(self, step: Any) -> bool:
        try:
            done = self._runner.is_done(step)
        except Exception as error:
            self._tape.fault = "is_done", f"{type(error).__name__}: {error}"
            raise
        self._tape.done.append(done)
        return done

    def read(self, step: Any) -> ModelRunnerOutput:
        try:
            self._tape.result = self._runner.read(step)
        except Exception as error:
            self._tape.fault = "read", f"{type(error).__name__}: {error}"
            raise
        return self._tape.result


class TapedProposer:
    """A proposer whose failures on the device go onto a tape. What it proposes is in the plan, or of no consequence."""

    def __init__(self, proposer: Proposer, tape: Tape) -> None:
        self._proposer = proposer
        self._tape = tape
        self.uses_device = proposer.uses_device

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        try:
            return self._proposer.propose(wanted)
        except Exception as error:
            if self.uses_device:
                self._tape.fault = "draft", f"{type(error).__name__}: {error}"
            raise

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)
