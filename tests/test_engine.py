"""The engine itself, on a real device: refusals, ends in every phase, death, memory, and that nothing compiles."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.compiled import CompileCounter
from jaxserve.engine_factory import create_engine
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams, ServiceTargets
from tests.engine_harness import VOCAB, ask, assert_as_solo, assert_idle, prompt_ids, run

# Those of tests/test_llm.py: programs are compiled once for both.
CHECKPOINT_OPTIONS = EngineConfig(
    dtype="float32",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=16,
    num_blocks=24,
)


@pytest.fixture
def make_engine(tiny_checkpoint_dir, compile_cache_dir):
    """Engines from the checkpoint on, each with weights of its own; closed afterwards."""
    options = dataclasses.replace(CHECKPOINT_OPTIONS, compilation_cache_dir=str(compile_cache_dir))
    made = []

    def make():
        made.append(create_engine(tiny_checkpoint_dir, options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


# -- what is refused


@pytest.mark.parametrize(
    ("request_", "param", "numbers"),
    [
        (ask("a", ()), "prompt", ()),
        (ask("a", (5, -1)), "prompt", (VOCAB - 1,)),
        (ask("a", (5, VOCAB)), "prompt", (VOCAB - 1,)),
        (ask("a", 256, None), "prompt", (256, 1)),
        (ask("a", 300), "prompt", (256, 300, 12)),
        (ask("a", 250, 7), "max_tokens", (256, 250, 7)),
        (ask("a", 250, None, min_tokens=7), "min_tokens", (7, 6)),
        (ask("a", 5, logit_bias={VOCAB: 1.0}), "logit_bias", (VOCAB - 1,)),
        (ask("a", 5, stop_token_ids=(3, VOCAB)), "stop_token_ids", (VOCAB - 1,)),
    ],
)
def test_what_cannot_run_is_refused_by_name_and_number(tiny_model, request_, param, numbers):
    engine = tiny_model.engine()
    for refuse in (engine.validate, engine.submit):
        with pytest.raises(InvalidRequestError) as caught:
            refuse(request_)
        assert caught.value.param == param
        assert "\n" not in str(caught.value)
        for number in numbers:
            assert str(number) in str(caught.value)
    assert not engine.has_work()


@pytest.mark.parametrize("length", [255, 256, 249])
def test_what_just_fits_runs(tiny_model, length):
    request = ask("a", length, max_tokens=256 - length)
    outcome = run(tiny_model.engine(), [request])["a", 0]
    assert len(outcome.token_ids) == 256 - length


def test_a_small_pool_limits_requests_by_its_own_numbers(tiny_model):
    engine = tiny_model.engine(num_blocks=5)
    assert engine.max_request_tokens == 40
    with pytest.raises(InvalidRequestError, match=r"KV cache holds 40 tokens.*38.*max_tokens=3") as caught:
        engine.submit(ask("big", 38, 3))
    assert caught.value.code == "context_length_exceeded"
    for length in (39, 38, 33, 32, 31):  # B085: all lengths below the limit run to the end
        request = ask(f"fits{length}", length, 40 - length)
        assert_as_solo(tiny_model, [request], run(engine, [request]))


def test_validating_is_pure_and_may_be_done_by_any_thread(tiny_model):
    engine = tiny_model.engine()
    good, bad = ask("good", 30), ask("bad", (5, VOCAB))

    def work(_: int) -> str:
        engine.validate(good)
        with pytest.raises(InvalidRequestError) as caught:
            engine.validate(bad)
        return str(caught.value)

    engine.submit(ask("running", 10, 50))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, i) for i in range(50)]
        while engine.has_work():
            engine.step()
            engine.check_integrity()
        assert len({future.result() for future in futures}) == 1
    assert_idle(engine)
    engine.submit(good)  # an id that was only validated is free


def test_sizes_that_multiply_have_limits():
    """B193."""
    for field, value in (("logprobs", 21), ("prompt_logprobs", 21), ("n", 129), ("logprobs", VOCAB)):
        with pytest.raises(InvalidRequestError, match=f"{field} must be between") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize("stop", ["\ud800", "END\udfff", ""])
def test_a_stop_string_that_no_text_can_hold_is_refused(stop):
    """B023: half a surrogate pair would never stop anything, and has no place in a recording."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=("\N{GRINNING FACE}", stop))
    assert caught.value.param == "stop"


def test_whole_contexts_scored_at_once_stay_exact(tiny_model):
    """B193: the most logprobs there can be, of as many prompts as there are slots."""
    requests = [ask(f"scored{i}", 240, 1, prompt_logprobs=20, logprobs=20) for i in range(16)]
    before = _device_bytes()
    engine = tiny_model.engine()
    for request in requests:
        engine.submit(request)
    peak = before
    done = []
    while engine.has_work():
        done += engine.step()
        peak = max(peak, _device_bytes())
    assert_idle(engine)
    assert len(done) == 16
    assert all(len(output.prompt_logprobs or ()) == 240 for output in done)
    assert peak - before < 240 * VOCAB * 4, "logits of a whole prompt stay on the device"


# -- submitting


def test_an_id_is_free_again_when_its_request_has_ended(tiny_model):
    engine = tiny_model.engine()
    engine.submit(ask("a", 5, 4))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.submit(ask("a", 6, 4))
    engine.step()
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.submit(ask("a", 6, 4))
    while engine.has_work():
        engine.step()
    engine.submit(ask("a", 5, 4))
    engine.abort("a")
    assert [output.finish_reason for output in engine.step()] == [FinishReason.ABORT]
    assert_idle(engine)


def test_a_full_queue_counts_every_choice_and_takes_nothing(tiny_model):
    engine = tiny_model.engine(max_waiting=3, max_num_seqs=1)  # so four at most, running or waiting
    engine.submit(ask("first", 5, 3, n=3, seed=0, temperature=1.0))
    with pytest.raises(QueueFullError, match="3 sequences"):
        engine.submit(ask("second", 5, 3, n=2, seed=0, temperature=1.0))
    engine.submit(ask("third", 5, 3))
    with pytest.raises(QueueFullError):
        engine.submit(ask("fourth", 5, 3))
    with pytest.raises(InvalidRequestError, match="n=5 is more than the 4"):  # not "later": never
        engine.submit(ask("fifth", 5, 3, n=5, seed=0, temperature=1.0))
    ended = []
    while engine.has_work():
        ended += [(o.request_id, o.index) for o in engine.step() if o.finish_reason]
    assert sorted(ended) == [("first", 0), ("first", 1), ("first", 2), ("third", 0)]
    engine.submit(ask("second", 5, 3, n=4, seed=0, temperature=1.0))


def test_unseeded_requests_repeat_with_the_engine(tiny_model):
    """The engine's seed decides all of them; two requests never share theirs."""
    requests = [ask(f"unseeded{i}", prompt_ids("same", 9), 10, temperature=1.0) for i in range(4)]
    by_seed = [
        [outcome.token_ids for outcome in run(tiny_model.engine(seed=seed), requests).values()]
        for seed in (1, 1, 2)
    ]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    assert len(set(map(tuple, by_seed[0]))) == 4


def test_a_seed_is_64_bits_wide(tiny_model):
    same = prompt_ids("wide", 9)
    seeds = {"low": 5, "high": 5 + 2**32, "negative": -1, "all": 2**64 - 1}
    requests = [ask(name, same, 10, temperature=1.0, seed=seed) for name, seed in seeds.items()]
    tokens = {name: outcome.token_ids for (name, _), outcome in run(tiny_model.engine(), requests).items()}
    assert tokens["low"] != tokens["high"]
    assert tokens["negative"] == tokens["all"]


# -- aborting


def abort_when(engine, request, condition) -> list[int]:
    """Submit, step until `condition()` holds, abort, and look at what is left one step later.

    Returns how many tokens each choice had.
    """
    engine.submit(request)
    for _ in range(200):
        if condition():
            break
        assert engine.has_work()
        engine.step()
        engine.check_integrity()
    else:
        pytest.fail("the phase never came")
    engine.abort(request.request_id)
    engine.abort(request.request_id)
    outputs = [output for output in engine.step() if output.request_id == request.request_id]
    engine.check_integrity()
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * request.params.n
    assert sorted(output.index for output in outputs) == list(range(request.params.n))
    return [output.num_output_tokens for output in outputs]


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_in_any_phase_frees_everything_within_a_step(tiny_model, n):
    options = {"seed": 3, "temperature": 1.0, "n": n}
    engine = tiny_model.engine(max_num_seqs=4, max_prefill_chunk=8)
    steps = itertools.count()
    assert abort_when(engine, ask("queued", 100, 20, **options), lambda: True) == [0] * n
    assert engine.stats.useful_tokens == 0
    assert_idle(engine)
    third = lambda: next(steps) == 3  # noqa: E731
    assert abort_when(engine, ask("mid-prefill", 100, 20, **options), third) == [0] * n
    assert 0 < engine.stats.useful_tokens < 100
    assert_idle(engine)
    decoding = lambda: engine.stats.generation_tokens > 8  # noqa: E731
    assert min(abort_when(engine, ask("decoding", 10, 90, **options), decoding)) > 0
    assert_idle(engine)
    # Preempted: two that outgrow a small pool, and the later one goes.
    small = tiny_model.engine(num_blocks=14)
    keep = ask("keep", 30, 70)
    small.submit(keep)
    abort_when(small, ask("preempted", 30, 60, **options), lambda: small.stats.preemptions > 0)
    rest = []
    while small.has_work():
        rest += small.step()
    assert rest[-1].num_output_tokens == 70
    assert_idle(small)


def test_an_abort_of_many_at_once_in_an_overcommitted_engine(tiny_model):
    engine = tiny_model.engine(num_blocks=30)
    requests = [ask(f"many{i}", 20, 60) for i in range(40)]
    for request in requests:
        engine.submit(request)
    while not engine.stats.preemptions:
        engine.step()
    for request in requests:
        engine.abort(request.request_id)
    assert {output.finish_reason for output in engine.step()} <= {FinishReason.ABORT}
    assert_idle(engine)
    engine.abort("nobody")
    assert not engine.has_work()
    after = ask("after", 20, 30)
    assert_as_solo(tiny_model, [after], run(engine, [after]))


# -- counting


def test_stats_add_up(tiny_model):
    engine = tiny_model.engine()
    requests = [ask(f"counted{i}", 10 + i, 5, n=2, seed=i, temperature=1.0) for i in range(5)]
    outcomes = run(engine, requests)
    stats = engine.stats
    assert stats.finished == {"length": 10}
    assert stats.generation_tokens == sum(len(outcome.token_ids) for outcome in outcomes.values()) == 50
    assert stats.prompt_tokens == 2 * sum(range(10, 15))
    assert stats.cached_prompt_tokens == sum(outcome.num_cached_tokens for outcome in outcomes.values())
    # Every known token but the last of each choice was computed once, or came from the cache or a fork.
    assert (
        stats.useful_tokens == stats.prompt_tokens - stats.cached_prompt_tokens + stats.generation_tokens - 10
    )
    assert stats.useful_tokens <= stats.padded_tokens
    assert stats.packing_efficiency == stats.useful_tokens / stats.padded_tokens
    assert 0 < stats.host_seconds < stats.step_seconds
    assert stats.steps > 0


def test_serving_compiles_nothing(tiny_model):
    """B129, B131: every batch size and padded size, one less and one more, with whatever requests may ask."""
    features = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
        {"logprobs": 20},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": dict.fromkeys(range(1000), 1.0)},
        {"prompt_logprobs": 5},
        {"n": 2, "temperature": 1.0},
        {"min_tokens": 2, "ignore_eos": False, "stop_token_ids": tuple(range(1024))},
        {"stop": tuple(f"stop{i}" for i in range(64))},
    ]
    sizes = [tokens for tokens, _ in tiny_model.buckets.seqs_by_tokens]
    lengths = sorted({1, 63, 64, 65, 127, 250, *(size + by for size in sizes for by in (-1, 0, 1))})
    everything = CompileCounter()
    seeds = itertools.count()
    engine = tiny_model.engine()
    with everything:
        for feature in features:
            run(engine, [ask(f"{next(seeds)}", n, 3, **{"seed": n, **feature}) for n in lengths])
        for count in range(1, 17):
            feature = features[count % len(features)]
            run(engine, [ask(f"{next(seeds)}", 1 + i % 3, 2, **{"seed": i, **feature}) for i in range(count)])
        pressed = tiny_model.engine(num_blocks=33, max_prefill_chunk=5)
        run(pressed, [ask(f"{next(seeds)}", 60, 40, **{"seed": 1, **feature}) for feature in features])
        assert pressed.stats.preemptions > 0
    everything.close()
    assert everything.count == 0
    assert engine.stats.serving_compilations == 0
    seen_a_compile = CompileCounter()
    with seen_a_compile:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    seen_a_compile.close()
    assert seen_a_compile.count == 1, "this test would notice none"


def test_every_step_works_in_place(tiny_model):
    """B234: the pool stays where it is, nothing is copied or kept, donation works."""
    engine = tiny_model.engine()
    pool = lambda: [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tiny_model.runner._state.kv_cache)]  # noqa: E731
    for i in range(8):
        engine.submit(ask(f"flat{i}", 8, 240, logprobs=5))
    engine.step()
    gc.collect()
    places, size = pool(), _device_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(150):
            engine.step()
            assert pool() == places, f"the pool moved at step {step}"
            assert _device_bytes() <= size, f"device memory grew at step {step}"
    for i in range(8):
        engine.abort(f"flat{i}")
    engine.step()
    assert_idle(engine)


def _device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


# -- rows that are not numbers


def test_logits_that_are_not_numbers_end_one_request_alone(tiny_model, cursed_token):
    """B082: its mates go on unchanged, and whoever gets its blocks afterwards is right as well."""
    mates = [ask(f"mate{i}", 9 + i, 40) for i in range(5)]
    for request in mates:
        tiny_model.solo(request)
    cursed = ask("cursed", [*prompt_ids("curse", 40), cursed_token, *prompt_ids("end", 20)], 40)
    choices = dataclasses.replace(cursed, request_id="choices")
    choices = dataclasses.replace(
        choices, params=dataclasses.replace(cursed.params, n=2, seed=1, temperature=1.0)
    )
    engine = tiny_model.engine(num_blocks=64, max_prefill_chunk=8)
    outcomes = run(engine, {0: mates, 3: [cursed, choices]})
    assert_as_solo(tiny_model, mates, outcomes)
    for key in (("cursed", 0), ("choices", 0), ("choices", 1)):
        assert outcomes[key].finish_reason is FinishReason.ERROR
        assert "NaN" in (outcomes[key].error or "")
        assert outcomes[key].token_ids == []
    assert engine.stats.finished["error"] == 3
    # The same beginning again, without the cursed token, and enough others to take every block.
    later = [ask("beginning", [*cursed.prompt_token_ids[:40], 500], 20)]
    later += [ask(f"later{i}", 30, 25) for i in range(12)]
    for _ in range(2):
        assert_as_solo(tiny_model, later, run(engine, later))


@pytest.fixture
def cursed_token(tiny_model):
    """A token that breaks whoever reads it. Its embedding is as it was afterwards."""
    token = 12345
    before = tiny_model.runner._params
    leaves, structure = jax.tree.flatten(before)
    at = next(i for i, leaf in enumerate(leaves) if leaf is _embedding(tiny_model))
    broken = leaves[at].at[token].set(np.nan)
    tiny_model.runner._params = jax.tree.unflatten(structure, [*leaves[:at], broken, *leaves[at + 1 :]])
    yield token
    tiny_model.runner._params = before
    broken.delete()


def _embedding(tiny_model):
    (embedding,) = jax.tree.leaves(tiny_model.params["embed_tokens"])
    return embedding


# -- dying and closing


def test_a_dead_engine_says_why(make_engine, monkeypatch):
    """B133, B175. What a device failure alone does: tests/exactness/test_step_failures.py."""
    engine = make_engine()
    engine.submit(ask("running", 5, 50))
    engine.step()

    def fail(*args):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine._runner, "launch", fail)
    monkeypatch.setattr(engine._runner, "rebuild_state", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    monkeypatch.undo()
    for call in (engine.step, lambda: engine.submit(ask("next", 5))):
        with pytest.raises(EngineDeadError, match="a step failed: RuntimeError: the device is on fire"):
            call()
    engine.abort("running")
    engine.close()
    with pytest.raises(EngineDeadError, match="it was closed"):
        engine.step()
    again = make_engine()
    assert len(run(again, [ask("next", 5, 4)])["next", 0].token_ids) == 4


def test_a_failure_inside_a_donated_step_is_recovered_from(make_engine, monkeypatch):
    """B133: the arrays are gone by then. Nothing hangs, and the tokens are those of an engine that never failed."""
    engine = make_engine()
    expected = run(make_engine(), [ask("lost", 5, 6)])
    device_get = jax.device_get
    calls = []

    def fail(arrays):
        device_get(arrays)
        calls.append(arrays)
        if len(calls) == 3:
            raise RuntimeError("lost the device")
        return device_get(arrays)

    monkeypatch.setattr(jax, "device_get", fail)
    outcomes = run(engine, [ask("lost", 5, 6)])
    assert len(calls) > 6
    assert engine.stats.step_failures == 1
    assert outcomes["lost", 0].token_ids == expected["lost", 0].token_ids


def test_engines_come_and_go(make_engine):
    """B188: closing frees the device's memory, twice closed is closed, and nothing works afterwards."""
    gc.collect()
    before = _device_bytes()
    tokens = []
    for _ in range(3):
        engine = make_engine()
        assert not tokens or engine.stats.compilations == 0, "B233: it has been compiled before"
        assert _device_bytes() > before + 10**6
        tokens.append(run(engine, [ask("a", 20, 10)])["a", 0].token_ids)
        engine.submit(ask("unfinished", 20, 10))
        engine.step()
        engine.close()
        engine.close()
        gc.collect()
        assert _device_bytes() <= before
        for call in (engine.step, lambda e=engine: e.submit(ask("late", 5))):
            with pytest.raises(EngineDeadError, match="it was closed"):
                call()
    assert tokens[0] == tokens[1] == tokens[2]


def test_two_engines_in_one_process(make_engine):
    """B188: also in two threads, and one goes on when the other is closed."""
    first, second = make_engine(), make_engine()
    requests = [ask(f"r{i}", 5 + 3 * i, 20) for i in range(6)]
    alone = run(first, requests)
    results = {}
    threads = [
        threading.Thread(target=lambda e=e, i=i: results.update({i: run(e, requests)}))
        for i, e in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    results[2] = run(second, requests)
    for outcomes in results.values():
        assert {k: o.token_ids for k, o in outcomes.items()} == {k: o.token_ids for k, o in alone.items()}


def test_a_pool_that_fits_nothing_is_refused_with_the_numbers(tiny_checkpoint_dir, compile_cache_dir):
    """B140."""
    before = _device_bytes()
    for changes, named in (
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": None, "memory_fraction": 1e-9}, r"too little memory for 8 KV blocks.*KV cache .* MB"),
        ({"num_blocks": None, "memory_fraction": 0.0}, r"memory_fraction must be in \(0, 1\]"),
        ({"num_blocks": None, "memory_fraction": 1.5}, r"memory_fraction must be in \(0, 1\]"),
        (
            {"num_blocks": 10**9},
            r"1000000000 KV blocks .* do not fit: together .*KV cache .* GB.*lower num_blocks",
        ),
    ):
        options = dataclasses.replace(
            CHECKPOINT_OPTIONS, compilation_cache_dir=str(compile_cache_dir), **changes
        )
        with pytest.raises(ConfigError, match=named):
            create_engine(tiny_checkpoint_dir, options)
    gc.collect()
    assert _device_bytes() <= before


def test_a_request_is_only_read(tiny_model):
    """B065: parameters belong to the caller; running changes none."""
    request = GenerationRequest(
        "a", prompt_ids("a", 9), SamplingParams(n=2, seed=7, max_tokens=4, stop=["x"])
    )
    before = repr(request)
    run(tiny_model.engine(), [request])
    assert repr(request) == before


def test_an_unknown_attention_backend_is_refused_before_anything_is_loaded(tiny_checkpoint_dir):
    told = []
    with pytest.raises(ConfigError, match="unknown attention backend 'pallas'; choose from: auto, xla"):
        create_engine(
            tiny_checkpoint_dir,
            EngineConfig(attention_backend="pallas"),
            progress=lambda what, done, total: told.append(what),
        )
    assert told == []


def test_a_chat_template_with_an_error_is_refused_before_anything_is_loaded(tiny_huggingface_dir, tmp_path):
    """B155: not after the minutes that weights and programs may take."""
    directory = shutil.copytree(tiny_huggingface_dir, tmp_path / "model")
    (directory / "chat_template.jinja").write_text("{% for message in messages %}")
    told = []
    with pytest.raises(CheckpointError, match="chat template") as caught:
        create_engine(directory, CHECKPOINT_OPTIONS, progress=lambda what, done, total: told.append(what))
    assert str(directory) in str(caught.value)
    assert told == []


def test_free_slots_do_not_count_as_waiting(tiny_model):
    """An idle engine takes what it can start at once, however short its queue may be."""
    engine = tiny_model.engine(max_waiting=1, max_num_seqs=4)
    for index in range(5):
        engine.submit(ask(f"r{index}", 5, 2))
    with pytest.raises(QueueFullError, match="5 sequences run or wait already, at most 5"):
        engine.submit(ask("one too many", 5, 2))
    while engine.has_work():
        engine.step()
    assert_idle(engine)


def test_a_refused_request_is_counted_and_changes_nobodys_random_numbers(tiny_model):
    """What is drawn for later requests doesn't depend on who was refused before."""

    def tokens_of_the_last(*, with_refused: bool) -> tuple[list[int], dict[str, int]]:
        engine = tiny_model.engine(max_num_seqs=1)
        engine.submit(ask("first", 5, 12))
        for _ in range(10):  # by then it knows how long steps take
            engine.step()
        if with_refused:
            hasty = dataclasses.replace(
                ask("hasty", 5, 3, temperature=1.0, seed=None, n=2), targets=ServiceTargets(ttft_seconds=1e-6)
            )
            with pytest.raises(OverloadedError, match="first token would come after") as caught:
                engine.submit(hasty)
            assert caught.value.reason == "ttft_target"
        engine.submit(ask("last", 5, 12, temperature=1.0, seed=None))
        token_ids = []
        while engine.has_work():
            token_ids += [t for o in engine.step() if o.request_id == "last" for t in o.token_ids]
        assert_idle(engine)
        return token_ids, engine.stats.refusals

    undisturbed, none = tokens_of_the_last(with_refused=False)
    disturbed, refused = tokens_of_the_last(with_refused=True)
    assert (none, refused) == ({}, {"ttft_target": 1})
    assert disturbed == undisturbed


def test_predictions_are_compared_with_what_came(tiny_model):
    engine = tiny_model.engine()
    for index in range(12):
        engine.submit(ask(f"r{index}", 5, 8))
        while engine.has_work():
            engine.step()
    stats = engine.stats
    assert stats.ttft_predictions >= 5
    assert min(stats.ttft_actual_seconds, stats.ttft_predicted_seconds, stats.ttft_error_seconds) > 0
