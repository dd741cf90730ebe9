"""A runner in front of another: what subclasses do not listen in on goes straight through."""

from __future__ import annotations

from typing import Any

from jaxserve.batch.builder import HostBatch
from jaxserve.engine import Runner
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.scheduler.output import SchedulerOutput


class RunnerProxy:
    """See `jaxserve.engine.Runner`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.padding_row = runner.padding_row

    @property
    def num_compiled(self) -> int:
        return self._runner.num_compiled

    @property
    def serving_compilations(self) -> int:
        return self._runner.serving_compilations

    @property
    def failure(self) -> BaseException | None:
        return self._runner.failure

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> Any:
        return self._runner.launch(plan, batch)

    def is_done(self, step: Any) -> bool:
        return self._runner.is_done(step)

    def read(self, step: Any) -> ModelRunnerOutput:
        return self._runner.read(step)

    def rebuild_state(self) -> None:
        self._runner.rebuild_state()

    def close(self) -> None:
        self._runner.close()
