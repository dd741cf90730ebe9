"""With and without speculation: the same tokens, logprobs and ends, whoever proposes what."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.scheduler.output import DraftRequest
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.stats import EngineStats
from tests.engine_harness import (
    Outcomes,
    ServedModel,
    ask,
    assert_as_solo,
    mixed_requests,
    prompt_ids,
    run,
)

SMALL_POOL = 40


class SoloProposer:
    """Proposes what each request says when it runs alone, but for every `wrong`-th token of it.

    Behind a stop it proposes what the request would have gone on with, so that drafts behind its end are accepted.
    """

    uses_device = False

    def __init__(self, model: ServedModel, requests: Sequence[GenerationRequest], wrong: int = 5) -> None:
        self._wrong = wrong
        self._truth: dict[str, list[int]] = {}
        for request in requests:
            for index, outcome in model.solo(unstopped(request, model.config.max_model_len)).items():
                self._truth[f"{request.request_id}:{index}"] = outcome.token_ids
        self.num_proposed = 0

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draft(item) for item in wanted]

    def _draft(self, item: DraftRequest) -> tuple[int, ...]:
        assert item.num_tokens > 0
        at = item.request.num_output_tokens
        truth = self._truth[item.request.request_id][at : at + item.num_tokens]
        truth += [7] * (item.num_tokens - len(truth))
        self.num_proposed += item.num_tokens
        return tuple(
            3000 if (at + i) % self._wrong == self._wrong - 1 else token for i, token in enumerate(truth)
        )

    def forget(self, request_id: str) -> None:
        del self._truth[request_id]


def unstopped(request: GenerationRequest, context: int) -> GenerationRequest:
    """The same, and on behind its stop strings and tokens and `max_tokens`; not where these say what may be drawn."""
    params = request.params
    if params.min_tokens or params.pooling is not None or params.max_tokens is None:
        return request
    room = context - len(request.prompt_token_ids)
    params = dataclasses.replace(
        params,
        stop=(),
        stop_token_ids=(),
        ignore_eos=True,
        prompt_logprobs=None,
        max_tokens=min(params.max_tokens + 8, room) if params.max_tokens else 0,
    )
    return dataclasses.replace(request, params=params)


@pytest.fixture(scope="module")
def mixed(tiny_model: ServedModel) -> list[GenerationRequest]:
    return mixed_requests(tiny_model)


def speculating(requests: Sequence[GenerationRequest], num_tokens: int) -> list[GenerationRequest]:
    return [
        dataclasses.replace(r, params=dataclasses.replace(r.params, speculative_tokens=num_tokens))
        for r in requests
    ]


def speculate(
    model: ServedModel, requests: Sequence[GenerationRequest], num_tokens: int, **options: object
) -> tuple[Outcomes, EngineStats]:
    requests = speculating(requests, num_tokens)
    proposer = SoloProposer(model, requests)
    engine = model.engine(proposer=proposer, num_speculative_tokens=num_tokens, **options)  # type: ignore[arg-type]
    outcomes = run(engine, requests)
    assert_as_solo(model, requests, outcomes)
    assert not proposer._truth, "requests have ended, and the proposer was not told"
    assert_counted(outcomes, engine.stats)
    return outcomes, engine.stats


def assert_counted(outcomes: Outcomes, stats: EngineStats) -> None:
    """What requests are told of tokens and drafts is what is in their outputs, and what the engine's counters say."""
    ends = outcomes.values()
    assert stats.generation_tokens == sum(len(end.token_ids) for end in ends)
    assert stats.speculation.draft_tokens == sum(end.num_draft_tokens for end in ends)
    assert stats.speculation.accepted_tokens == sum(end.num_accepted_tokens for end in ends)
    reasons = Counter(end.finish_reason.value for end in ends if end.finish_reason)
    assert Counter(stats.finished) == reasons


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
def test_every_kind_of_request(
    tiny_model: ServedModel, mixed: list[GenerationRequest], num_tokens: int, overlap: bool
) -> None:
    """Penalties, bias, stops, seeds, logprobs: all rules hold at every position (B164, B165, B166, B168, B196)."""
    _, stats = speculate(tiny_model, mixed, num_tokens, overlap=overlap)
    counts = stats.speculation
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    assert sum(counts.accepted_by_position) == counts.accepted_tokens
    assert counts.accepted_by_position == sorted(counts.accepted_by_position, reverse=True)
    assert counts.accepted_tokens > 50


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_preempted(
    tiny_model: ServedModel, mixed: list[GenerationRequest], num_host_blocks: int, overlap: bool
) -> None:
    """B115: whoever is preempted begins again, and no result of before reaches it."""
    _, stats = speculate(
        tiny_model, mixed, 5, num_blocks=SMALL_POOL, num_host_blocks=num_host_blocks, overlap=overlap
    )
    assert stats.preemptions > 0


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_the_end_of_the_context(tiny_model: ServedModel, num_tokens: int) -> None:
    """B169: drafts never reach behind the last position, nor need a block that is not there."""
    limit = 64
    requests = [ask(f"end{length}", length, limit - length) for length in (40, 55, 56, 57, 61, 62, 63)]
    outcomes, _ = speculate(tiny_model, requests, num_tokens, max_model_len=limit)
    assert {outcome.finish_reason for outcome in outcomes.values()} == {FinishReason.LENGTH}
    alone = [ask("exact", 55, 9)]
    speculate(tiny_model, alone, num_tokens, num_blocks=8)  # the exact blocks


def test_ngrams_of_a_text_that_repeats(tiny_model: ServedModel) -> None:
    """A model of random weights repeats nothing, so the drafts are wrong, and harm nobody."""
    phrase = prompt_ids("phrase", 9)
    requests = speculating(
        [ask(f"r{i}", phrase * 3 + phrase[: i + 2], 20, seed=i, temperature=0.5 * i) for i in range(4)], 5
    )
    engine = tiny_model.engine(proposer=NgramProposer(), num_speculative_tokens=5)
    outcomes = run(engine, requests)
    assert_as_solo(tiny_model, requests, outcomes)
    assert engine.stats.speculation.draft_tokens > 0


def test_stops_in_the_middle_of_a_draft(tiny_model: ServedModel) -> None:
    """B164, B165: at every place of a draft, nothing behind the stop token or string is delivered or counted."""
    prompt = prompt_ids("plain", 31)
    (alone,) = tiny_model.solo(ask("plain", prompt, 24)).values()
    requests = []
    for at in range(2, 14):
        if alone.token_ids[at] not in alone.token_ids[:at]:
            requests.append(ask(f"id{at}", prompt, 24, stop_token_ids=(alone.token_ids[at],), logprobs=2))
    for at in range(3, len(alone.text) // 2):
        text = alone.text[at : at + 3]
        if "\ufffd" not in text and alone.text.index(text) == at:
            requests.append(ask(f"text{at}", prompt, 24, stop=(text,), logprobs=2))
    assert len(requests) > 10
    for start in range(0, len(requests), 12):
        chunk = requests[start : start + 12]
        outcomes, _ = speculate(tiny_model, chunk, 7)
        assert {outcome.finish_reason for outcome in outcomes.values()} == {FinishReason.STOP}


def test_two_ends_in_one_draft(tiny_model: ServedModel) -> None:
    """A stop string before a stop token or the last token allowed, verified in one step: only the first end counts."""
    prompt = prompt_ids("plain", 31)
    (alone,) = tiny_model.solo(ask("plain", prompt, 24)).values()
    stops = [
        alone.text[at : at + 3]
        for at in range(3, len(alone.text) // 2)
        if "\ufffd" not in alone.text[at : at + 3] and alone.text.index(alone.text[at : at + 3]) == at
    ]
    requests = []
    for at, stop in enumerate(stops[:6]):
        (short,) = tiny_model.solo(ask("short", prompt, 24, stop=(stop,))).values()
        length = len(short.token_ids)
        requests += [
            ask(f"length{at}-{more}", prompt, length + more, stop=(stop,), stream=bool(more % 2))
            for more in range(4)
        ]
        if (behind := alone.token_ids[length]) not in short.token_ids:
            requests.append(ask(f"token{at}", prompt, 24, stop=(stop,), stop_token_ids=(behind,)))
    assert len(requests) > 20
    for start in range(0, len(requests), 12):
        speculate(tiny_model, requests[start : start + 12], 7)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_a_grammar_ends_in_the_middle_of_a_draft(tiny_model: ServedModel, num_tokens: int) -> None:
    """Nothing behind a complete answer is delivered or counted, whatever end the drafts behind it would have had."""
    prompt, grammar = prompt_ids("plain", 31), Grammar.choice(["a red apple on a table"])
    (alone,) = tiny_model.solo(ask("plain", prompt, 24, grammar=grammar)).values()
    length = len(alone.token_ids)
    assert alone.finish_reason is FinishReason.STOP
    requests = [
        ask(f"length{more}", prompt, length + more, grammar=grammar, ignore_eos=more % 2 == 1)
        for more in range(-1, 8)
    ]
    requests += [
        # What `SoloProposer` proposes behind the end, where everything is allowed.
        ask("bias", prompt, 24, grammar=grammar, logit_bias={7: 100.0}, stop_token_ids=(7,)),
        ask("stop", prompt, 24, grammar=grammar, stop=("table", "apple on")),
        ask("digits", prompt, 11, grammar=Grammar(GrammarKind.REGEX, "[0-9]{4,9}"), logit_bias={7: 100.0}),
    ]
    speculate(tiny_model, requests, num_tokens)


def test_a_request_may_decline(tiny_model: ServedModel) -> None:
    requests = speculating([ask("without", 12, 12)], 0)
    engine = tiny_model.engine(proposer=SoloProposer(tiny_model, requests), num_speculative_tokens=5)
    assert_as_solo(tiny_model, requests, run(engine, requests))
    assert engine.stats.speculation.draft_tokens == 0
