"""A step that the device fails at costs time and nothing else: the same tokens, in whatever company and moment."""

from __future__ import annotations

import jax
import pytest

from jaxserve.engine import MAX_STEP_FAILURES
from jaxserve.errors import EngineDeadError
from jaxserve.request import FinishReason
from tests.engine_harness import ask, assert_as_solo, assert_idle, mixed_requests, run


class FlakyRunner:
    """The runner, with launches and reads that fail after the device has been given the step, state and all.

    Attributes:
      launches, reads: numbers of those that fail, counted from 0 over the runner's life.
    """

    def __init__(self, model, launches=(), reads=()) -> None:
        self._runner = model.runner
        self.padding_row, self.num_compiled = model.runner.padding_row, model.runner.num_compiled
        self.failure: BaseException | None = None
        self.is_done = model.runner.is_done
        self.launches, self.reads = set(launches), set(reads)
        self.num_launches = self.num_reads = self.num_rebuilt = 0

    @property
    def serving_compilations(self) -> int:
        return self._runner.serving_compilations

    def launch(self, plan, batch):
        self.num_launches += 1
        step = self._runner.launch(plan, batch)
        if self.num_launches - 1 in self.launches:
            raise RuntimeError("the device is on fire")
        return step

    def read(self, step):
        self.num_reads += 1
        if self.num_reads - 1 in self.reads:
            raise RuntimeError("the device is on fire")
        return self._runner.read(step)

    def rebuild_state(self) -> None:
        self.num_rebuilt += 1
        before = jax.tree.leaves(self._runner._state)
        self._runner.rebuild_state()
        assert all(array.is_deleted() for array in before), "two states at once may not fit"

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def mixed(tiny_model):
    return mixed_requests(tiny_model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["launches", "reads"])
def test_every_kind_of_request_goes_on_exactly(tiny_model, mixed, overlap, where):
    """Seeds, penalties, stops, n, logprobs, prompt logprobs, shared prefixes, and a pool that must preempt."""
    failing = {where: (0, 3, 4, 12, 20, 21, 30, 40)}
    runner = FlakyRunner(tiny_model, **failing)
    engine = tiny_model.engine(overlap=overlap, runner=runner, num_blocks=60)
    assert_as_solo(tiny_model, mixed, run(engine, mixed))
    assert engine.stats.step_failures == runner.num_rebuilt == 8
    assert engine.stats.step_failures_in_a_row == 0


def test_the_static_baseline_goes_on_as_well(tiny_model):
    requests = [ask("a", 20, 9), ask("b", 3, 14), ask("c", 40, 5)]
    runner = FlakyRunner(tiny_model, launches=(1, 6), reads=(9,))
    engine = tiny_model.engine(runner=runner, scheduler="static", enable_prefix_caching=False)
    assert_as_solo(tiny_model, requests, run(engine, requests))
    assert engine.stats.step_failures == 3


def test_nothing_of_the_lost_cache_is_found(tiny_model):
    """A prefix that was cached before the failure is computed again after it."""
    runner = FlakyRunner(tiny_model)
    engine = tiny_model.engine(runner=runner)
    first, again = ask("first", range(100, 180), 4), ask("again", range(100, 180), 4)
    run(engine, [first])
    runner.launches.add(runner.num_launches)
    runner.num_compiled = 0
    outcomes = run(engine, [ask("other", 5, 3)])
    assert len(outcomes["other", 0].token_ids) == 3
    outcomes = run(engine, [again])
    assert outcomes["again", 0].num_cached_tokens == 0
    assert_as_solo(tiny_model, [again], outcomes)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_go_on_failing_end_those_that_run_and_nobody_else(tiny_model, overlap):
    runner = FlakyRunner(tiny_model, launches=range(4, 4 + MAX_STEP_FAILURES))
    engine = tiny_model.engine(overlap=overlap, runner=runner, max_num_seqs=2)
    unlucky, waiting = [ask(name, 5, 30) for name in "ab"], [ask(name, 7, 6) for name in "cd"]
    outcomes = run(engine, [*unlucky, *waiting])
    for request in unlucky:
        outcome = outcomes[request.request_id, 0]
        assert outcome.finish_reason is FinishReason.ERROR
        assert f"failed at {MAX_STEP_FAILURES} steps in a row" in (outcome.error or "")
        assert "on fire" not in outcome.error, "details are for the log"
    assert_as_solo(tiny_model, waiting, outcomes)
    assert engine.stats.step_failures == MAX_STEP_FAILURES
    assert_idle(engine)


def test_a_device_that_cannot_be_had_back_ends_the_engine(tiny_model, monkeypatch):
    runner = FlakyRunner(tiny_model, reads=(2,))

    def fail() -> None:
        raise MemoryError("no device")

    runner.rebuild_state = fail  # type: ignore[method-assign]
    engine = tiny_model.engine(runner=runner)
    engine.submit(ask("a", 5, 20))
    engine.step()
    engine.step()
    with pytest.raises(MemoryError, match="no device"):
        engine.step()
    for call in (engine.step, lambda: engine.submit(ask("b", 5))):
        with pytest.raises(EngineDeadError, match=r"on fire.*MemoryError: no device"):
            call()


def test_a_program_that_could_not_be_made_is_no_failure_to_recover_from(tiny_model):
    runner = FlakyRunner(tiny_model, launches=(1,))
    engine = tiny_model.engine(runner=runner)
    engine.submit(ask("a", 5, 20))
    engine.step()
    runner.launch = lambda plan, batch: _raise_after(runner)  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDeadError):
        engine.step()
    assert runner.num_rebuilt == 0


def _raise_after(runner) -> None:
    runner.failure = MemoryError("the compiler had no room")
    raise KeyError("no such program")


def test_a_bug_in_planning_is_fatal(tiny_model, monkeypatch):
    """Counters that do not add up would go on not adding up."""
    runner = FlakyRunner(tiny_model)
    engine = tiny_model.engine(runner=runner)
    engine.submit(ask("a", 5, 20))
    engine.step()
    monkeypatch.setattr(engine._scheduler, "update_from_output", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        engine.step()
    assert runner.num_rebuilt == 0
