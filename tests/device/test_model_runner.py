from __future__ import annotations

import dataclasses
import gc
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import BatchBuilder
from jaxserve.config import RopeConfig
from jaxserve.device.model_runner import ModelRunner
from jaxserve.progress import NullProgress
from jaxserve.request import Request
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput
from tests.device.driver import CONFIG, MODEL, Driver, make_runner
from tests.fakes import make_request


def live_bytes() -> tuple[int, int]:
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_hundreds_of_steps_take_no_more_memory(tiny_runner: ModelRunner) -> None:
    """Donated buffers are really reused, and nothing of what is read back keeps any of them."""
    driver = Driver(tiny_runner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        request = driver.admit(
            make_request("warm", [1, 2, 3], temperature=0.7, logprobs=2, prompt_logprobs=1)
        )
        driver.finish(request, 3)
        gc.collect()
        before = live_bytes()
        pointers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(tiny_runner._state)]
        for start in range(2):
            request = driver.admit(
                make_request(f"r{start}", [5, 6], temperature=0.7, logprobs=2, prompt_logprobs=1)
            )
            while request.num_output_tokens < 110:
                old = jax.tree.leaves(tiny_runner._state)
                driver.step((request, request.num_tokens - request.num_computed_tokens))
                assert all(array.is_deleted() for array in old), "not donated"
                del old
                assert live_bytes() == before
                assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tiny_runner._state)] == pointers
    assert tiny_runner.serving_compilations == 0


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 3.0, 250: -100.0},
    "min_tokens": 9,
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("params", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(
    tiny_runner: ModelRunner, params: dict[str, Any], temperature: float
) -> None:
    """Other blocks, another slot that somebody else has used, chunks of recomputed output: the same tokens."""

    def request(name: str) -> Request:
        return make_request(name, list(range(40, 60)), 20, temperature=temperature, stop=(7, 9), **params)

    driver = Driver(tiny_runner, 1)
    reference = driver.finish(driver.admit(request("b")), 14)
    for cut in (1, 8):
        other = driver.admit(make_request(f"o{cut}", [3] * 30, 20, temperature=1.0, **EVERYTHING))
        driver.finish(other, 5)
        driver.preempt(other)
        again = driver.admit(request(f"c{cut}"))
        driver.finish(again, cut)
        driver.preempt(again)
        driver.admit(again)
        driver.step((again, 11))
        assert again.num_output_tokens == cut, "a chunk that does not reach the end samples nothing"
        assert driver.finish(again, 14) == reference


def test_a_resumed_row_equals_the_one_that_grew(tiny_runner: ModelRunner) -> None:
    driver = Driver(tiny_runner)
    request = driver.admit(make_request("a", [4, 5, 5, 6], 20, temperature=0.0, stop=(9, 300), **EVERYTHING))
    driver.finish(request, 8)
    row = lambda: [np.asarray(x[request.slot]) for x in jax.tree.leaves(tiny_runner._state.sampling)]  # noqa: E731
    grown = row()
    driver.preempt(request)
    driver.admit(request)
    driver.step((request, 4))
    for one, other in zip(grown, row(), strict=True):
        assert np.array_equal(one, other)


def test_an_old_occupants_history_is_forgotten(tiny_runner: ModelRunner) -> None:
    """A slot passes from a request with every setting to one with few, and to one with none."""
    for params in ({}, {"frequency_penalty": 0.3}, {"min_tokens": 3}, {"logit_bias": {3: 1.0}}):
        first = Driver(tiny_runner)
        expected = first.finish(
            first.admit(make_request("x", [9, 9, 9], max_tokens=20, temperature=0.0, stop=(5,), **params)), 6
        )
        driver = Driver(tiny_runner)
        before = driver.admit(
            make_request("y", list(range(60)), 20, temperature=0.0, stop=(1, 2), **EVERYTHING)
        )
        driver.finish(before, 12)
        slot = before.slot
        driver.preempt(before)
        driver._free_slots = [slot]
        assert (
            driver.finish(
                driver.admit(
                    make_request("x", [9, 9, 9], max_tokens=20, temperature=0.0, stop=(5,), **params)
                ),
                6,
            )
            == expected
        )


def test_a_broken_request_fails_alone_and_leaves_nothing_behind(tiny_runner: ModelRunner) -> None:
    """NaN in one request's cache: its mate does not notice, nor does whoever gets its blocks next."""
    prompt = [1, 2, 3, 4, 5]
    solo = Driver(tiny_runner)
    expected = list(solo.finish(solo.admit(make_request("h", prompt, temperature=0.0)), 6))
    driver = Driver(tiny_runner, 1)
    mate = driver.admit(make_request("m", prompt, temperature=0.0, logprobs=3))
    bad = driver.admit(make_request("b", [8] * 7, temperature=0.0, logprobs=3))
    driver.step((mate, 5), (bad, 7))
    block = driver.blocks["b:0"][0]
    state = tiny_runner._state
    keys = (state.kv_cache.k[0].at[block, 0, 1].set(jnp.nan), *state.kv_cache.k[1:])
    tiny_runner._state = dataclasses.replace(state, kv_cache=dataclasses.replace(state.kv_cache, k=keys))
    for _ in range(3):
        result = driver.step((mate, 1), (bad, 1))
        assert result.failed == {"b:0": "the model produced NaN or infinite logits for this request"}
        assert set(result.sampled_token_ids) == set(result.logprobs) == {"m:0"}
        assert all(np.isfinite(pair[1]) for pair in result.logprobs["m:0"][0].top)
        bad.output_token_ids.append(0)
    fresh = Driver(tiny_runner, 2)
    fresh._free_blocks += driver.blocks["b:0"][::-1]
    assert fresh.finish(fresh.admit(make_request("f", prompt, temperature=0.0)), 6) == expected
    assert fresh.blocks["f:0"][0] == block
    assert driver.finish(mate, 6) == expected


def test_a_shape_that_nobody_compiled_is_refused(tiny_runner: ModelRunner) -> None:
    request = make_request("a", [1, 2, 3], temperature=0.0)
    request.slot = 0
    plan = SchedulerOutput(0, (ScheduledRequest(request, 0, 3, 0, (1,), True, is_new=True),))
    other = ShapeBuckets(((5, (3,)),), CONFIG.max_blocks_per_seq)
    builder = BatchBuilder(other, block_size=CONFIG.block_size, padding_row=tiny_runner.padding_row)
    batch = builder.build(plan)
    assert batch.bucket == Bucket(5, 3, CONFIG.max_blocks_per_seq)
    with pytest.raises(LookupError, match="T5xS3"):
        tiny_runner.launch(plan, batch)
    assert tiny_runner.serving_compilations == 0


def test_a_restart_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    small = {
        "buckets": ShapeBuckets(((2, (1,)),), CONFIG.max_blocks_per_seq),
        "cache_directory": tmp_path / "c",
    }
    outputs, compiled = [], []
    for _ in range(2):
        runner = make_runner(**small)
        runner.warm_up(NullProgress())
        compiled.append(runner.num_compiled)
        driver = Driver(runner)
        request = driver.admit(make_request("a", [3], 9, temperature=0.8, **EVERYTHING))
        outputs.append(list(driver.finish(request, 9)))
        assert runner.serving_compilations == 0
        runner.close()
    assert compiled == [7, 0]  # five parts of a step (layers share one), and two that change state alone
    assert outputs[0] == outputs[1]


def test_whatever_shapes_a_program_names_another_folder(tmp_path: Path) -> None:
    """A stale program of another model or pool would read memory that is not there."""
    changes: list[dict[str, Any]] = [
        {},
        {"num_blocks": 11},
        {"model": dataclasses.replace(MODEL, rms_norm_eps=1e-6)},
        {"model": dataclasses.replace(MODEL, rope=RopeConfig(theta=5e5))},
        {"model": dataclasses.replace(MODEL, num_layers=1)},
        {"model": dataclasses.replace(MODEL, hidden_act="gelu")},
        {"config": dataclasses.replace(CONFIG, dtype="bfloat16")},
        {"config": dataclasses.replace(CONFIG, max_num_seqs=15)},
        {"config": dataclasses.replace(CONFIG, block_size=8)},
    ]
    folders = set()
    for change in changes:
        runner = make_runner(**{"num_blocks": 10, **change, "cache_directory": tmp_path})
        assert runner._maker.cache is not None
        folders.add(runner._maker.cache.directory)
        runner.close()
    assert len(folders) == len(changes)
    runner = make_runner(num_blocks=10, cache_directory=tmp_path)
    assert runner._maker.cache is not None
    assert runner._maker.cache.directory in folders, "the same again finds its programs"
    runner.close()


def test_closing_frees_the_device() -> None:
    gc.collect()
    before = jax.live_arrays()  # held, so that nothing of other tests goes meanwhile
    runner = make_runner(num_blocks=10)
    assert len(jax.live_arrays()) > len(before)
    runner.close()
    del runner
    gc.collect()
    known = {id(array) for array in before}
    assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []
