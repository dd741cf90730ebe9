"""Steps launched before the one before is read: the same tokens, and nothing leaks, whatever ends meanwhile.

`test_schedules.py` draws schedules with and without overlap; here is what needs a certain moment.
"""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.errors import EngineDeadError
from jaxserve.models.random_weights import init_random
from jaxserve.outputs import ModelRunnerOutput
from jaxserve.request import FinishReason
from tests.engine_harness import (
    TINY_MODEL,
    TINY_OPTIONS,
    ask,
    assert_as_solo,
    assert_idle,
    mixed_requests,
    run,
    serve,
)
from tests.text_models import smollm2

SMALL_POOL = 40


@pytest.fixture(scope="module")
def mixed(tiny_model):
    # A step with a grammar is taken in before the next is planned: `test_grammars.py`.
    return [request for request in mixed_requests(tiny_model) if request.params.grammar is None]


class Spy:
    """The runner, with a record of what was launched, and a way to fail.

    Attributes:
      rows: (request id, continues) of every launch. ahead: whether the step before had not been read by then.
      fail_read: the number of the step whose reading raises.
    """

    def __init__(self, model) -> None:
        self._runner = model.runner
        self.padding_row, self.num_compiled = model.runner.padding_row, model.runner.num_compiled
        self.is_done = model.runner.is_done
        self.rows: list[dict[str, bool]] = []
        self.ahead: list[bool] = []
        self.num_read = 0
        self.fail_read: int | None = None
        self.broken: tuple[str, int] | None = None
        self.closed = False

    @property
    def serving_compilations(self) -> int:
        return self._runner.serving_compilations

    @property
    def failure(self) -> BaseException | None:
        return self._runner.failure

    def launch(self, plan, batch):
        self.ahead.append(len(self.rows) > self.num_read)
        self.rows.append({row.request_id: row.continues for row in batch.rows})
        return self._runner.launch(plan, batch)

    def read(self, step) -> ModelRunnerOutput:
        if self.num_read == self.fail_read:
            raise RuntimeError("the device is gone")
        result = self._runner.read(step)
        if self.broken is not None and self.num_read == self.broken[1]:
            result.sampled_token_ids.pop(self.broken[0])
            result.failed[self.broken[0]] = "not finite"
        self.num_read += 1
        return result

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": SMALL_POOL}, {"max_num_seqs": 3, "max_prefill_chunk": 5}]
)
def test_every_kind_of_request_is_as_alone(tiny_model, mixed, options):
    """Seeds, penalties, stop strings, n, logprobs, prompt logprobs; preempted under pressure, with few slots."""
    spy = Spy(tiny_model)
    engine = tiny_model.engine(overlap=True, runner=spy, **options)
    assert_as_solo(tiny_model, mixed, run(engine, mixed))
    assert spy.ahead.count(True) > 0.9 * len(spy.ahead), "hardly any step was launched ahead"
    assert sum(any(rows.values()) for rows in spy.rows) > 0.5 * len(spy.rows)
    assert (engine.stats.preemptions > 5) == ("num_blocks" in options)


def test_max_tokens_waste_no_row(tiny_model):
    """The end is known ahead, and the last token is never computed."""
    spy = Spy(tiny_model)
    requests = [ask("a", 5, 7), ask("b", 9, 1), ask("c", 3, 0), ask("d", 4, 2)]
    run(tiny_model.engine(overlap=True, runner=spy), requests)
    for request in requests:
        count = sum(f"{request.request_id}:0" in rows for rows in spy.rows)
        assert count == max(1, request.params.max_tokens), request.request_id


def test_a_stop_found_late_costs_one_row(tiny_model):
    """A stop token, and a stop string; others go on, and a newcomer takes the slot and the blocks at once."""
    (solo,) = tiny_model.solo(ask("a", 20, 20)).values()
    token = next(t for i, t in enumerate(solo.token_ids) if i > 3 and t not in solo.token_ids[:i])
    at = solo.token_ids.index(token)
    stopped = ask("a", 20, 20, stop_token_ids=(token,))
    others = [ask("b", 11, 30, temperature=0.7, seed=3), ask("c", 25, 30), ask("d", 14, 30)]
    spy = Spy(tiny_model)
    engine = tiny_model.engine(overlap=True, runner=spy, max_num_seqs=2, num_blocks=14)
    outcomes = run(engine, [stopped, *others])
    assert_as_solo(tiny_model, [stopped, *others], outcomes)
    assert outcomes["a", 0].stop_reason == token
    assert sum("a:0" in rows for rows in spy.rows) == at + 2
    ended = max(i for i, rows in enumerate(spy.rows) if "a:0" in rows)
    assert any(name not in ("a:0", "b:0") for name in spy.rows[ended + 1]), "the slot stayed empty"


@pytest.mark.parametrize("step", [1, 2, 5])
def test_aborts_with_a_step_under_way(tiny_model, mixed, step):
    """All at once, and the blocks are back before that step has been read; then the same again."""
    engine = tiny_model.engine(overlap=True, num_blocks=SMALL_POOL)
    for request in mixed:
        engine.submit(request)
    for _ in range(step):
        engine.step()
    for request in mixed:
        engine.abort(request.request_id)
    engine.check_integrity()
    again = [dataclasses.replace(request, request_id=f"{request.request_id}-2") for request in mixed]
    outcomes = run(_Forgetful(engine), again)
    for request in mixed:
        outcomes |= {
            (request.request_id, i): outcomes[f"{request.request_id}-2", i] for i in range(request.params.n)
        }
    assert_as_solo(tiny_model, mixed, outcomes)


class _Forgetful:
    """An engine whose outputs for requests that are aborted are of no interest."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self):
        return [output for output in self._engine.step() if output.finish_reason is not FinishReason.ABORT]


def test_a_row_that_fails_is_found_late_and_ends_alone(tiny_model):
    good, bad = ask("good", 12, 20), ask("bad", 12, 20)
    spy = Spy(tiny_model)
    spy.broken = ("bad:0", 4)
    engine = tiny_model.engine(overlap=True, runner=spy)
    outcomes = run(engine, [good, bad])
    assert_as_solo(tiny_model, [good], outcomes)
    assert outcomes["bad", 0].finish_reason is FinishReason.ERROR
    assert sum("bad:0" in rows for rows in spy.rows) == 6, "one row more than was read of it"


def test_an_exception_found_late_loses_the_step_behind_it_too(tiny_model):
    spy = Spy(tiny_model)
    spy.fail_read = 3
    engine = tiny_model.engine(overlap=True, runner=spy)
    engine.submit(ask("a", 5, 20))
    for _ in range(4):
        engine.step()
    spy.rebuild_state = tiny_model.runner.rebuild_state
    assert engine.step() == []
    assert (spy.num_read, len(spy.rows)) == (3, 5), "the step behind it had been launched"
    spy.fail_read = None
    engine.step()
    assert len(spy.rows) == 6, "and is not read: the request begins again"
    assert (spy.num_read, engine.stats.step_failures) == (3, 1)
    engine.close()
    assert spy.closed


def test_a_client_that_waits_for_one_token_gets_it(tiny_model):
    """Nothing is held back when there is no next step to launch."""
    engine = tiny_model.engine(overlap=True)
    engine.submit(ask("a", 5, 1))
    assert engine.step() == []
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.LENGTH
    assert_idle(engine)


def test_closing_with_a_step_under_way_frees_the_device(compile_cache_dir):
    options = dataclasses.replace(TINY_OPTIONS, max_num_seqs=2, max_num_batched_tokens=8, overlap=True)
    model = serve(
        options,
        TINY_MODEL,
        init_random(TINY_MODEL, jax.numpy.float32),
        smollm2(),
        compile_cache_dir,
        buckets=ShapeBuckets(((8, (2,)),), 32),
    )
    engine = model.engine()
    arrays = jax.tree.leaves((model.runner._params, model.runner._state))
    engine.submit(ask("a", 5, 20))
    for _ in range(3):
        engine.step()
    state = jax.tree.leaves(model.runner._state)
    assert engine.has_work()
    engine.close()
    assert all(array.is_deleted() for array in [*arrays, *state])
    with pytest.raises(EngineDeadError):
        engine.step()
