"""From accepted tokens to outputs: what every front door shows."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput, RequestUpdate, TokenLogprobs
from jaxserve.request import FinishReason, Request, SamplingParams
from tests.text_models import byte_tokens, smollm2, token_with_bytes

pytestmark = pytest.mark.usefixtures("quick_to_compile")

EOS = 2


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Loading is no part of drawing an example."""
    smollm2()


def make_request(prompt: str | list[int] = "Hello", *, index: int = 0, **params) -> Request:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    ids = smollm2().encode(prompt) if isinstance(prompt, str) else prompt
    return Request(
        request_id=f"r:{index}",
        group_id="r",
        index=index,
        prompt_token_ids=tuple(ids),
        params=sampling,
        seed=0,
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}),
    )


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=-float(token), rank=1)


class Run:
    """Feeds one request's tokens in steps, as the scheduler would, and gathers what comes out."""

    def __init__(self, request: Request, *, stream: bool = True) -> None:
        self.request = request
        self.processor = OutputProcessor(smollm2())
        self.processor.add(request, stream)
        self.outputs: list[RequestOutput] = []
        self.stopped: list[tuple[RequestUpdate, int, str]] = []

    def step(
        self,
        tokens: list[int],
        finish: FinishReason | None = None,
        stop_reason=None,
        error=None,
        num_accepted_drafts: int = 0,
    ) -> None:
        self.request.output_token_ids += tokens
        self.request.finish_reason, self.request.stop_reason = finish, stop_reason
        if finish is not None:
            from jaxserve.request import RequestStatus

            self.request.status = RequestStatus.FINISHED
        wants = self.request.params.logprobs is not None
        update = RequestUpdate(
            self.request,
            list(tokens),
            [logprob(token) for token in tokens] if wants else None,
            error=error,
            num_accepted_drafts=num_accepted_drafts,
        )
        outputs, stopped = self.processor.process([update])
        self.outputs += outputs
        self.stopped += stopped

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def end(self) -> RequestOutput:
        """The last output; checks that it alone says how the request ended."""
        *earlier, last = self.outputs
        assert all(output.finish_reason is None for output in earlier)
        assert last.finish_reason is not None
        return last


def run(request: Request, steps: list[list[int]], finish: FinishReason, *, stream: bool) -> Run:
    """Run `steps`; the last one ends the request unless a stop string did so before."""
    result = Run(request, stream=stream)
    for number, tokens in enumerate(steps, 1):
        result.step(tokens, finish if number == len(steps) else None)
        if result.stopped:
            break
    return result


@st.composite
def scenarios(draw):
    tokenizer = smollm2()
    ids = tokenizer.encode(draw(st.text(alphabet="ab\n. 🦩", max_size=20)))
    ids += byte_tokens(tokenizer, "🦩".encode()[: draw(st.integers(0, 4))])
    by_eos = draw(st.booleans())
    if by_eos:
        ids = [*ids, EOS]
    params = {
        "stop": tuple(draw(st.lists(st.text(alphabet="ab\n. 🦩", min_size=1, max_size=4), max_size=3))),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 4)),
        "logprobs": draw(st.sampled_from([None, 0])),
    }
    cuts = sorted({draw(st.integers(0, len(ids))) for _ in range(draw(st.integers(0, 6)))})
    edges = [0, *cuts, len(ids)]
    steps = [ids[a:b] for a, b in itertools.pairwise(edges) if a < b] or [[]]
    return ids, steps, params, FinishReason.STOP if by_eos else FinishReason.LENGTH


@settings(max_examples=300)
@given(scenario=scenarios())
def test_steps_and_streaming_change_nothing(scenario):
    """B004, B012: the same text, tokens, logprobs and end, whether tokens come one by one, several a step (as with
    speculation), streamed or not."""
    ids, steps, params, finish = scenario
    singles = [[token] for token in ids] or [[]]
    runs = [
        run(make_request(**params), chosen, finish, stream=stream)
        for chosen in (singles, steps, [ids])
        for stream in (True, False)
    ]
    first = runs[0]
    for other in runs[1:]:
        assert other.text == first.text
        assert other.tokens == first.tokens
        assert other.end.num_output_tokens == first.end.num_output_tokens == len(first.tokens)
        assert (other.end.finish_reason, other.end.stop_reason) == (
            first.end.finish_reason,
            first.end.stop_reason,
        )
    for each in runs:
        for output in each.outputs:
            if params["logprobs"] is None:
                assert output.logprobs is None
            else:
                assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for unstreamed in runs[1::2]:
        assert len(unstreamed.outputs) == 1


@settings(max_examples=200)
@given(scenario=scenarios())
def test_the_whole_is_what_the_definition_says(scenario):
    """Text: one-shot decoding, cut at the first stop string completed by a token past min_tokens. Tokens: up to it."""
    ids, steps, params, finish = scenario
    got = run(make_request(**params), steps, finish, stream=True)
    tokenizer = smollm2()
    shown = ids
    if finish is FinishReason.STOP and not params["include_stop_str_in_output"]:
        shown = ids[:-1]
    if got.end.stop_reason is None:
        assert got.tokens == ids
        assert got.text == tokenizer.decode(shown, skip_special_tokens=params["skip_special_tokens"])
        assert got.end.finish_reason is finish
    else:
        stop = got.end.stop_reason
        assert got.end.finish_reason is FinishReason.STOP
        assert stop in params["stop"]
        assert len(got.tokens) > params["min_tokens"]
        whole = tokenizer.decode(ids, skip_special_tokens=params["skip_special_tokens"])
        assert whole.startswith(got.text)
        if params["include_stop_str_in_output"]:
            assert got.text.endswith(stop)
        else:
            assert whole[len(got.text) :].startswith(stop)


def test_tokens_after_a_stop_string_are_dropped():
    """B165: in the middle of a step's tokens; the engine is told to end the request."""
    tokenizer = smollm2()
    ids = tokenizer.encode("one END two three")
    result = Run(make_request(stop=("END",), logprobs=0))
    result.step(ids)
    assert result.text == "one "
    assert tokenizer.decode(result.tokens) == "one END"
    assert [entry.token_id for entry in result.end.logprobs] == result.tokens
    assert result.end.num_output_tokens == len(result.tokens)
    assert (result.end.finish_reason, result.end.stop_reason) == (FinishReason.STOP, "END")
    ((update, num_kept, stop),) = result.stopped
    assert (update.new_token_ids, num_kept, stop) == (ids, len(result.tokens), "END")
    result.step(tokenizer.encode("late"))  # a step that was already under way
    assert result.text == "one "


def test_a_stop_string_in_the_step_that_reaches_the_length_wins():
    result = Run(make_request(stop=("END",)))
    result.step(smollm2().encode("an END"), FinishReason.LENGTH)
    assert (result.end.finish_reason, result.end.stop_reason) == (FinishReason.STOP, "END")
    ((update, num_kept, stop),) = result.stopped  # the scheduler has ended it, for another reason
    assert (num_kept, stop) == (len(update.new_token_ids), "END")


def test_drafts_behind_a_stop_string_are_not_counted():
    first, second = smollm2().encode("one two"), smollm2().encode(" END three four")
    result = Run(make_request(stop=("END",)))
    result.step(first)
    result.step(second, FinishReason.LENGTH, num_accepted_drafts=len(second) - 1)
    assert result.end.num_accepted_tokens == result.end.num_output_tokens - len(first) < len(second) - 1


@pytest.mark.parametrize("include", [False, True])
def test_a_leading_byte_as_the_last_token(include):
    """B004: the limit shows U+FFFD; a stop token shows its text only on demand."""
    lead = token_with_bytes(smollm2(), b"\xf0")
    limit = Run(make_request(max_tokens=1))
    limit.step([lead], FinishReason.LENGTH)
    assert (limit.text, limit.end.num_output_tokens) == ("\ufffd", 1)
    stop = Run(make_request(stop_token_ids=(lead,), include_stop_str_in_output=include))
    stop.step([lead], FinishReason.STOP, lead)
    assert (stop.text, stop.end.num_output_tokens) == ("\ufffd" if include else "", 1)
    assert stop.end.stop_reason == lead
    assert stop.tokens == [lead]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_eos_is_a_token_without_text(skip, include):
    result = Run(make_request(skip_special_tokens=skip, include_stop_str_in_output=include))
    result.step(smollm2().encode("done"))
    result.step([EOS], FinishReason.STOP)
    assert result.text == ("done<|im_end|>" if include and not skip else "done")
    assert result.tokens[-1] == EOS


def test_eos_in_the_middle_is_text_where_it_is_ignored():
    result = Run(make_request(ignore_eos=True, skip_special_tokens=False))
    result.step([EOS])
    result.step(smollm2().encode("on"), FinishReason.LENGTH)
    assert result.text == "<|im_end|>on"


def test_a_token_takes_as_much_memory_to_process_however_many_came_before():
    """B159: nothing of the output so far is gone through, or copied, again; stop strings and logprobs included."""
    request = make_request(stop=("@@@", "the end"), logprobs=0, max_tokens=9000)
    ids = itertools.cycle(smollm2().encode("The quick brown fox 🦩 jumps over the @@ dog. "))
    processor = OutputProcessor(smollm2())
    processor.add(request)

    def most_bytes(count: int) -> int:
        """While so many tokens are processed one by one."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for token in itertools.islice(ids, count):
            processor.process([RequestUpdate(request, [token], [logprob(token)])])
        return tracemalloc.get_traced_memory()[1] - before

    most_bytes(100)
    tracemalloc.start()
    try:
        early = most_bytes(100)
        most_bytes(6000)
        assert most_bytes(100) < early + 500
    finally:
        tracemalloc.stop()


def test_held_text_comes_with_the_end():
    """B012, by the limit and by EOS."""
    newline = smollm2().encode("\n")
    for tokens, finish in ((newline, FinishReason.LENGTH), ([*newline, EOS], FinishReason.STOP)):
        result = Run(make_request(stop=("\n\n###",)))
        result.step(smollm2().encode("line"))
        for token in tokens[:-1]:
            result.step([token])
        result.step(tokens[-1:], finish)
        assert result.text == "line\n"


def test_min_tokens_covers_stop_strings():
    """B017."""
    newline = smollm2().encode("\n")
    result = Run(make_request(stop=("\n",), min_tokens=4, include_stop_str_in_output=True))
    for _ in range(6):
        result.step(newline)
        if result.stopped:
            break
    assert result.end.num_output_tokens == 5
    assert result.text == "\n" * 5


def test_an_abort_and_an_error_end_the_output_with_what_there_is():
    for finish, error in ((FinishReason.ABORT, None), (FinishReason.ERROR, "logits are not finite")):
        result = Run(make_request(stop=("\n###",)))
        result.step(smollm2().encode("part\n"))
        result.step([], finish, error=error)
        assert result.text == "part\n"
        assert (result.end.finish_reason, result.end.error) == (finish, error)


def test_a_discarded_request_is_silent():
    result = Run(make_request())
    result.processor.discard("r:0")
    result.processor.discard("unknown")
    result.step(smollm2().encode("late"), FinishReason.LENGTH)
    assert result.outputs == []


def test_counters_of_the_prompt_are_passed_on():
    request = make_request("one two three")
    request.num_cached_tokens = 2
    result = Run(request)
    result.step(smollm2().encode("x"), FinishReason.LENGTH)
    assert (result.end.num_prompt_tokens, result.end.num_cached_tokens) == (3, 2)


# -- prompt logprobs


def prompt_step(processor: OutputProcessor, request: Request, start: int, stop: int, tokens=()):
    """A step that computes prompt positions start..stop, and so scores start+1..stop."""
    request.num_computed_tokens = stop
    last = min(stop, request.num_prompt_tokens - 1)
    entries = [logprob(request.prompt_token_ids[position]) for position in range(start + 1, last + 1)]
    update = RequestUpdate(request, list(tokens), prompt_logprobs=entries)
    outputs, _ = processor.process([update])
    return outputs


@settings(max_examples=60)
@given(data=st.data())
def test_prompt_logprobs_survive_chunks_and_preemption(data):
    """One entry a prompt token, in order, whatever the chunks and however often the prompt was begun again."""
    length = data.draw(st.integers(1, 12))
    request = make_request(list(range(100, 100 + length)), prompt_logprobs=1)
    processor = OutputProcessor(smollm2())
    processor.add(request)
    computed = 0
    outputs = []
    while computed < length:
        if data.draw(st.integers(0, 4)) == 0:
            computed = 0  # preempted
        stop = computed + data.draw(st.integers(1, length - computed))
        outputs += prompt_step(processor, request, computed, stop, [5] if stop == length else [])
        computed = stop
    outputs += processor.process([RequestUpdate(request, [6])])[0]
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False]
    assert outputs[0].prompt_logprobs[0] is None
    assert [entry.token_id for entry in outputs[0].prompt_logprobs[1:]] == list(request.prompt_token_ids[1:])


def test_prompt_logprobs_come_with_the_first_choice_alone_and_only_on_demand():
    for request in (make_request([5, 6], index=1, prompt_logprobs=0), make_request([5, 6])):
        processor = OutputProcessor(smollm2())
        processor.add(request)
        assert prompt_step(processor, request, 0, 2, [7])[0].prompt_logprobs is None


def test_prompt_logprobs_of_an_aborted_prompt_are_left_out():
    request = make_request([5, 6, 7, 8], prompt_logprobs=0)
    processor = OutputProcessor(smollm2())
    processor.add(request)
    assert prompt_step(processor, request, 0, 2) == []
    request.finish_reason = FinishReason.ABORT
    (output,), _ = processor.process([RequestUpdate(request, [])])
    assert output.prompt_logprobs is None
