"""The offline class, on the real engine, scheduler and tokenizer. Most tests replace only the device, by a model whose
answers can be computed by hand; the last ones run a tiny real model."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxserve.batch.buckets import default_buckets
from jaxserve.completion import Completion
from jaxserve.config import GenerationDefaults, ModelConfig
from jaxserve.engine import EngineCore
from jaxserve.errors import EngineDeadError, GenerationError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.fakes import FakeRunner, make_config, make_request, solo_tokens
from tests.text_models import smollm2

VOCAB = 97
NUM_BLOCKS = 64
MODEL = ModelConfig("LlamaForCausalLM", 49152, 64, 128, 2, 4, 2, 16, 4096)


class HandRunner(FakeRunner):
    """Attributes:
    before_step: called with the number of the step before it runs.
    """

    num_compiled = 0
    serving_compilations = 0
    failure = None

    def __init__(self, block_size: int, num_blocks: int, padding_row: int) -> None:
        super().__init__(block_size, num_blocks, VOCAB)
        self.padding_row = padding_row
        self.before_step: Callable[[int], None] = lambda step: None
        self.closed = False

    def launch(self, plan, batch):
        self.before_step(self.num_steps)
        return self.run(plan)

    def is_done(self, step):
        return True

    def read(self, step):
        return step

    def rebuild_state(self) -> None:
        raise MemoryError("no device")

    def close(self) -> None:
        self.closed = True


def make_llm(**changes) -> tuple[LLM, HandRunner]:
    config = make_config(max_model_len=200, **changes)
    runner = HandRunner(config.block_size, NUM_BLOCKS, config.max_num_seqs)
    engine = EngineCore(
        model_name="hand",
        config=config,
        model_config=MODEL,
        generation=GenerationDefaults(eos_token_ids=(2,)),
        tokenizer=smollm2(),
        runner=runner,
        buckets=default_buckets(config),
        num_blocks=NUM_BLOCKS,
    )
    return LLM.from_engine(engine), runner


@pytest.fixture
def llm():
    made, _ = make_llm()
    with made:
        yield made


def params(seed: int = 7, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": seed, "ignore_eos": True, **changes})


def expected(prompt: str | list[int], own: SamplingParams) -> list[int]:
    ids = smollm2().encode(prompt) if isinstance(prompt, str) else prompt
    request = make_request("x", ids, own.max_tokens)
    request.seed = own.seed
    return solo_tokens(request, VOCAB)


def check(completion: Completion, prompt: str | list[int], own: SamplingParams) -> None:
    choice = completion.choices[0]
    assert choice.token_ids == expected(prompt, own)
    assert choice.text == smollm2().decode(choice.token_ids)
    assert choice.finish_reason == "length"


def assert_idle(llm: LLM) -> None:
    """Nothing runs any more, and every block is free."""
    assert not llm.engine.has_work()
    assert not llm._routes
    llm.engine.check_integrity()
    assert llm.engine.stats.num_free_blocks == NUM_BLOCKS


# -- results


def test_every_call_returns_its_own_results_in_order(llm):
    """B099: duplicates, empty calls, calls after a failed one."""
    for prompts in (["a", "b", "c"], ["d", "e"], [], ["a", "a", "a"], [f"prompt {i}" for i in range(30)]):
        results = llm.generate(prompts, params(), progress=False)
        assert [result.prompt for result in results] == prompts
        for result, prompt in zip(results, prompts, strict=True):
            check(result, prompt, params())
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", ""], params(), progress=False)
    check(llm.generate("after", params(), progress=False)[0], "after", params())
    assert_idle(llm)


def test_threads_get_their_own_results(llm):
    def work(number: int) -> None:
        own = params(seed=number, max_tokens=3 + number)
        prompts = [f"{number} {i}" for i in range(5)]
        for result, prompt in zip(llm.generate(prompts, own, progress=False), prompts, strict=True):
            check(result, prompt, own)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert_idle(llm)


def test_prompts_of_every_form(llm):
    ids = smollm2().encode("some words")
    forms = [
        "some words",
        ids,
        tuple(ids),
        np.asarray(ids),
        {"prompt": "some words"},
        {"prompt_token_ids": ids},
    ]
    for form in forms:
        (single,) = llm.generate(form, params(), progress=False)
        assert single.prompt_token_ids == ids
        check(single, ids, params())
    for result in llm.generate(forms, params(), progress=False):
        check(result, ids, params())


def test_parameters_for_each_prompt_and_several_choices(llm):
    own = [params(seed=1, max_tokens=2), params(seed=2, max_tokens=5, n=3)]
    first, second = llm.generate(["a", "b"], own, progress=False)
    check(first, "a", own[0])
    check(second, "b", own[1])
    assert [choice.index for choice in second.choices] == [0, 1, 2]
    assert all(len(choice.token_ids) == 5 for choice in second.choices)
    assert len({tuple(choice.token_ids) for choice in second.choices}) == 3


def test_logprobs_and_prompt_logprobs_are_passed_on(llm):
    ids = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
    (result,) = llm.generate([ids], params(logprobs=0, prompt_logprobs=0), progress=False)
    assert len(result.choices[0].logprobs) == 6
    assert result.prompt_logprobs[0] is None
    assert [entry.token_id for entry in result.prompt_logprobs[1:]] == ids[1:]


def test_cached_tokens_are_reported_whole_and_streamed(llm):
    """B177."""
    ids = list(range(20, 60))
    counts = [llm.generate([ids], params(), progress=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 36]  # full blocks, and a token is left to compute
    assert {piece.num_cached_tokens for piece in llm.stream(ids, params())} == {36}


def test_a_stop_string_ends_the_text_tokens_and_request(llm):
    text = llm.generate("a", params(max_tokens=30), progress=False)[0].text
    stop = text[10:13]
    (result,) = llm.generate("a", params(max_tokens=30, stop=(stop,)), progress=False)
    assert result.text == text[: text.index(stop)]
    assert result.choices[0].stop_reason == stop
    assert smollm2().decode(result.choices[0].token_ids).startswith(result.text + stop)
    assert_idle(llm)


def test_a_failed_row_fails_alone(llm):
    runner = llm.engine._runner
    runner.failing = {f"{llm._id_prefix}-1:0"}
    good, bad, fine = llm.generate(["a", "b", "c"], params(), progress=False)
    check(good, "a", params())
    check(fine, "c", params())
    assert bad.choices[0].finish_reason == "error"
    assert "finite" in bad.choices[0].error


def test_chat_is_the_template_and_takes_one_or_many(llm):
    one = [{"role": "user", "content": "Hi"}]
    ids = smollm2().encode_chat(one)
    (single,) = llm.chat(one, params(), progress=False)
    check(single, ids, params())
    assert single.prompt.endswith("<|im_start|>assistant\n")
    other = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}]
    results = llm.chat([other, one], params(), continue_final_message=False, progress=False)
    check(results[1], ids, params())
    (open_turn,) = llm.chat(other, params(), continue_final_message=True, progress=False)
    check(open_turn, smollm2().encode_chat(other, continue_final_message=True), params())
    assert llm.chat([], params(), progress=False) == []


# -- refusals


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("", "at least one token"),
        ([10**6], "prompt token ids"),
        ([True], "integers"),
        ([1.5], "integers"),
        (["x"], "integers"),
        (b"bytes", "token ids"),
        (None, "token ids"),
        ({"text": "x"}, "'prompt'"),
        ("\ud83d", "surrogate"),
        ("word " * 300, "holds 200 tokens"),
        ("x" * 10**7, "characters"),
    ],
)
def test_an_invalid_prompt_is_named_and_nothing_runs(llm, bad, why):
    with pytest.raises(InvalidRequestError, match=why) as caught:
        llm.generate(["fine", bad, "fine"], params(), progress=False)
    assert str(caught.value).startswith("prompt 1: ")
    assert llm.engine._runner.num_steps == 0
    assert_idle(llm)


@pytest.mark.parametrize("nothing", [None, 7, (text for text in ["a"]), {"a"}])
def test_what_is_neither_a_prompt_nor_a_list_is_refused(llm, nothing):
    for ask in (llm.generate, llm.embed):
        with pytest.raises(InvalidRequestError, match=f"got {type(nothing).__name__}") as caught:
            ask(nothing, progress=False)
        assert caught.value.param == "prompt"


def test_an_invalid_conversation_is_named(llm):
    fine = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match=r"^conversation 1: messages\[0\].role"):
        llm.chat([fine, [{"role": "nobody", "content": "x"}]], params(), progress=False)


def test_as_many_parameters_as_prompts(llm):
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [params(), params()], progress=False)


def test_more_prompts_than_may_wait():
    llm, _ = make_llm(max_waiting=3)
    with llm:
        prompts = [f"p{i}" for i in range(40)]
        for result, prompt in zip(llm.generate(prompts, params(), progress=False), prompts, strict=True):
            check(result, prompt, params())
        with pytest.raises(InvalidRequestError, match="n=100 is more than"):  # and not a wait without end
            llm.generate("x", params(n=100), progress=False)
        check(llm.generate("x", params(), progress=False)[0], "x", params())
        assert_idle(llm)


# -- streaming


def test_streamed_pieces_are_the_answer(llm):
    whole = llm.generate("a", params(max_tokens=40), progress=False)[0]
    pieces = list(llm.stream("a", params(max_tokens=40)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.choices[0].token_ids
    assert len(pieces) > 10
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert_idle(llm)


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_a_stream_left_early_is_aborted(llm, how):
    """B187."""
    stream = llm.stream("a", params(max_tokens=100, n=2))
    next(stream)
    assert llm.engine.has_work()
    if how == "close":
        stream.close()
    elif how == "break":
        for _ in stream:
            break
    del stream
    gc.collect()
    assert_idle(llm)
    check(llm.generate("next", params(), progress=False)[0], "next", params())


def test_a_stream_that_never_began_costs_nothing(llm):
    stream = llm.stream("a", params())
    assert not llm.engine.has_work()
    del stream
    with pytest.raises(InvalidRequestError):
        llm.stream("", params())


def test_other_calls_may_run_while_a_stream_is_open(llm):
    stream = llm.stream("a", params(max_tokens=20))
    pieces = [next(stream)]
    check(
        llm.generate("b", params(seed=3, max_tokens=30), progress=False)[0],
        "b",
        params(seed=3, max_tokens=30),
    )
    pieces += stream
    assert [t for piece in pieces for t in piece.token_ids] == expected("a", params(max_tokens=20))
    assert_idle(llm)


# -- interruptions


def test_ctrl_c_aborts_the_call_and_leaves_the_engine_usable():
    """B187: the signal arrives while a step runs; the step is not cut short, and nothing of the call goes on."""
    llm, runner = make_llm()

    def interrupt(step: int) -> None:
        if step == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    runner.before_step = interrupt
    with llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([f"long {i}" for i in range(10)], params(max_tokens=100), progress=False)
        assert_idle(llm)
        results = llm.generate(["short"], params(), progress=False)
        assert len(results) == 1
        check(results[0], "short", params())


def test_an_exception_in_the_callers_progress_function_aborts(llm):
    def show(what: str, done: int, total: int) -> None:
        if done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b", "c"], [params(max_tokens=n) for n in (2, 90, 90)], progress=show)
    assert_idle(llm)
    check(llm.generate("next", params(), progress=False)[0], "next", params())


def test_progress_reaches_the_total(llm):
    seen = []
    llm.generate(["a", "b", "c"], params(), progress=lambda *args: seen.append(args))
    assert seen[0] == ("generating", 0, 3)
    assert seen[-1] == ("generating", 3, 3)


def test_a_dead_engine_reaches_every_caller_and_later_ones():
    llm, runner = make_llm()

    def fail(step: int) -> None:
        if step == 5:
            raise RuntimeError("device lost")

    runner.before_step = fail
    errors = []

    def work() -> None:
        try:
            llm.generate("x", params(max_tokens=50), progress=False)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 3
    assert sum(isinstance(error, MemoryError) for error in errors) == 1
    assert sum(isinstance(error, EngineDeadError) for error in errors) == 2
    with pytest.raises(EngineDeadError):
        llm.generate("y", params(), progress=False)
    llm.close()


def test_inside_a_running_event_loop(llm):
    async def main() -> list[Completion]:
        return llm.generate("a", params(), progress=False)

    check(asyncio.run(main())[0], "a", params())


# -- the end


def test_nothing_works_after_closing():
    llm, runner = make_llm()
    stream = llm.stream("a", params(max_tokens=50))
    next(stream)
    llm.close()
    llm.close()
    assert runner.closed
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.generate([]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream("x"),
        lambda: next(stream),
        llm.__enter__,
    ):
        with pytest.raises(EngineDeadError):
            call()


def test_closing_ends_a_call_in_another_thread():
    llm, runner = make_llm()
    started = threading.Event()
    runner.before_step = lambda step: started.set()
    caught = []

    def work() -> None:
        try:
            llm.generate([f"{i}" for i in range(200)], params(max_tokens=150), progress=False)
        except EngineDeadError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    llm.close()
    thread.join(30)
    assert len(caught) == 1
    assert runner.closed


# -- a real model on a real device


OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "num_blocks": 24,
}


def test_a_real_model_answers_and_gives_its_memory_back(tiny_checkpoint_dir, compile_cache_dir):
    def device_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = device_bytes()
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["Hello", "The quick brown fox jumps over the lazy dog", "🦩🦩"]
    with LLM(
        tiny_checkpoint_dir, progress=False, compilation_cache_dir=str(compile_cache_dir), **OPTIONS
    ) as llm:
        assert device_bytes() > before + 10**6
        together = llm.generate(prompts, greedy, progress=False)
        for result, prompt in zip(together, prompts, strict=True):
            (alone,) = llm.generate(prompt, greedy, progress=False)
            assert alone.choices[0].token_ids == result.choices[0].token_ids
            pieces = list(llm.stream(prompt, greedy))
            assert "".join(piece.text for piece in pieces) == result.text
        (scored,) = llm.generate("a b c", SamplingParams(max_tokens=1, prompt_logprobs=1), progress=False)
        assert [entry is None for entry in scored.prompt_logprobs] == [True, False, False]
        check_embeddings(llm, prompts)
        assert llm.engine.stats.serving_compilations == 0
    assert device_bytes() <= before


def check_embeddings(llm: LLM, texts: list[str]) -> None:
    """Rows in the order of the inputs, alone as together; of a single token mean and last are the same."""
    together = llm.embed([*texts, *texts], progress=False)
    assert together.dtype == np.float32
    assert together.shape == (2 * len(texts), 64)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for row, text in enumerate(texts):
        np.testing.assert_allclose(llm.embed(text, progress=False), together[row : row + 1], atol=2e-6)
    np.testing.assert_allclose(together[: len(texts)], together[len(texts) :], atol=2e-6)
    tokens = llm.engine.tokenizer.encode(texts[1])
    last = llm.embed([texts[1], tokens, [7]], pooling="last", progress=False)
    np.testing.assert_allclose(last[0], last[1], atol=2e-6)
    assert not np.allclose(last[0], together[1], atol=1e-2)
    np.testing.assert_allclose(last[2:], llm.embed([7], progress=False), atol=2e-6)
    assert llm.embed([], progress=False).shape == (0, 64)
    with pytest.raises(InvalidRequestError, match="input 1"):
        llm.embed(["fine", ""], progress=False)


def test_an_embedding_that_could_not_be_made_is_an_error(llm):
    """Here, because its model of the device has no hidden states; nothing is left of the call."""
    with pytest.raises(GenerationError):
        llm.embed(["one", "two"], progress=False)
    assert_idle(llm)


def test_options_are_given_one_way_only(tiny_checkpoint_dir):
    from jaxserve.config import EngineConfig

    with pytest.raises(TypeError, match="not both"):
        LLM(tiny_checkpoint_dir, config=EngineConfig(), max_num_seqs=2)
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(tiny_checkpoint_dir, max_num_seq=2)
