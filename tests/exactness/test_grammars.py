"""Outputs keep to their grammars in whatever company, with drafts, overlap, preemption, swaps; others notice nothing.

That they are those of a solo run is tested wherever `mixed_requests` is; here is what is true of grammars alone.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.structured_output.compiler import GrammarCompiler
from tests.engine_harness import (
    CHOICES,
    COLOURED,
    WORDS,
    Outcome,
    ask,
    assert_as_solo,
    assert_idle,
    mixed_requests,
    run,
)

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{4,60}")
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]{60}[a-z]+")
MODES = {
    "alone": {},
    "overlapped": {"overlap": True},
    "static": {"scheduler": "static"},
    "small pool": {"num_blocks": 40},
    "swapped": {"num_blocks": 40, "num_host_blocks": 60},
    "drafts": {"num_speculative_tokens": 4, "speculative": "ngram"},
}


@pytest.fixture(scope="module")
def mixed(tiny_model):
    return mixed_requests(tiny_model)


def engine_for(model, mode: str):
    proposer = NgramProposer() if mode == "drafts" else None
    return model.engine(proposer=proposer, **MODES[mode])


def check(outcomes: dict[tuple[str, int], Outcome]) -> None:
    """Every output that came to its end fits; one that was cut off is where it fits."""
    value = outcomes["json", 0]
    if value.finish_reason is FinishReason.STOP:
        found = json.loads(value.text)
        assert set(found) == set(COLOURED["properties"])
        assert type(found["a"]) is int
        assert found["b"] in ("red", "green")
    else:
        assert value.text.startswith("{")
    words = outcomes["regex", 0]
    assert words.finish_reason is FinishReason.STOP
    assert re.fullmatch(WORDS, words.text)
    for index in range(2):
        assert outcomes["choice", index].text in CHOICES  # also where min_tokens wants more
        assert outcomes["choice", index].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("mode", MODES)
def test_outputs_fit_in_every_mode(tiny_model, mixed, mode):
    engine = engine_for(tiny_model, mode)
    outcomes = run(engine, mixed)
    check(outcomes)
    assert_as_solo(tiny_model, mixed, outcomes)
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["alone", "drafts"])
def test_an_end_is_an_end_without_eos(tiny_model, mode):
    """Nothing can follow: `stop`, at once, whatever ignore_eos and min_tokens say."""
    requests = [
        ask("fixed", 9, 50, grammar=Grammar.choice(["yes it is"]), ignore_eos=True, min_tokens=40),
        ask("open", 9, 50, grammar=DIGITS, ignore_eos=True, min_tokens=30),
        ask("cut", 9, 3, grammar=DIGITS),
        ask("none", 9, 0, grammar=DIGITS),
    ]
    outcomes = run(engine_for(tiny_model, mode), requests)
    assert outcomes["fixed", 0].text == "yes it is"
    assert outcomes["fixed", 0].finish_reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{4,60}", outcomes["open", 0].text)
    assert outcomes["cut", 0].finish_reason is FinishReason.LENGTH
    assert len(outcomes["cut", 0].token_ids) == 3
    assert outcomes["none", 0].text == ""
    exact = dataclasses.replace(
        requests[0].params, min_tokens=0, max_tokens=len(outcomes["fixed", 0].token_ids)
    )
    outcomes = run(engine_for(tiny_model, mode), [dataclasses.replace(requests[0], params=exact)])
    assert outcomes["fixed", 0].text == "yes it is"
    assert outcomes["fixed", 0].finish_reason is FinishReason.STOP, "its limit cuts nothing off"


def test_composed_with_all_that_shapes_the_next_token(tiny_model):
    """A bias of 100 on a token that does not fit, penalties, filters, stops: what comes still fits."""
    vocabulary = tiny_model.tokenizer
    (letter,) = vocabulary.encode("x", add_special_tokens=False)
    (seven,) = vocabulary.encode("7", add_special_tokens=False)
    shapes = [
        {"logit_bias": {letter: 100.0}},
        {"logit_bias": {seven: 100.0}, "logprobs": 2},
        {"temperature": 2.0, "top_p": 0.01, "seed": 1},
        {"temperature": 5.0, "top_k": 3, "seed": 2},
        {"temperature": 1.0, "min_p": 0.9, "seed": 3},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.7},
        {"stop": ("77",)},
        {"stop_token_ids": (seven,)},
    ]
    requests = [ask(f"shape{i}", 12, 20, grammar=DIGITS, **shape) for i, shape in enumerate(shapes)]
    outcomes = run(tiny_model.engine(), requests)
    for (name, _), outcome in outcomes.items():
        assert re.fullmatch("[0-9]*", outcome.text), name
        assert outcome.token_ids
    assert set(outcomes["shape1", 0].text) == {"7"}
    assert_as_solo(tiny_model, requests, outcomes)


def test_forks_go_their_own_ways(tiny_model):
    request = ask("n", 30, 30, n=6, seed=4, temperature=1.5, grammar=Grammar(GrammarKind.REGEX, WORDS))
    outcomes = run(tiny_model.engine(num_blocks=40), [request])
    texts = [outcome.text for outcome in outcomes.values()]
    assert all(re.fullmatch(WORDS, text) for text in texts)
    assert len(set(texts)) > 3


class _Giver(GrammarCompiler):
    """Gives up on one grammar's masks after some steps, as llguidance does on what becomes too complex."""

    def __init__(self, compiler: GrammarCompiler, after: int) -> None:
        self._inner, self._left = compiler, after

    def compile(self, grammar):
        return self._inner.compile(grammar)

    def fault(self, matcher, mask_W=None):
        self._left -= 1
        return "it is too complex" if self._left == 0 else None


def test_one_that_becomes_too_complex_ends_alone_with_an_error(tiny_model):
    requests = [
        ask("complex", 9, 40, grammar=DIGITS, ignore_eos=True, min_tokens=39),
        ask("plain", 9, 12),
    ]
    engine = tiny_model.engine(grammars=_Giver(tiny_model.grammars, after=6))
    outcomes = run(engine, requests)
    failed = outcomes["complex", 0]
    assert failed.finish_reason is FinishReason.ERROR
    assert "too complex" in (failed.error or "")
    assert len(failed.token_ids) == 5
    assert_as_solo(tiny_model, requests[1:], outcomes)
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_misses_a_step(tiny_model, overlap):
    """With a grammar a request gets a token a step, as its mates do, overlapped or not."""
    requests = [
        ask("digits", 9, 40, grammar=LETTERS, ignore_eos=True),
        ask("plain", 9, 40, ignore_eos=True),
    ]
    engine = tiny_model.engine(overlap=overlap)
    for request in requests:
        engine.submit(request)
    counts, steps = {"digits": 0, "plain": 0}, 0
    while min(counts.values()) < 30:
        steps += 1
        for output in engine.step():
            counts[output.request_id] += len(output.token_ids)
    assert steps < 35
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work():
        engine.step()


def test_aborted_ones_are_forgotten(tiny_model):
    requests = [ask(f"doomed{i}", 9, 40, grammar=DIGITS, min_tokens=30) for i in range(4)]
    engine = tiny_model.engine()
    run(engine, requests, aborts={3: [request.request_id for request in requests]})
    assert_idle(engine)
    assert not engine._masks.is_used


def test_nothing_compiles_and_no_mask_no_change(tiny_model, mixed):
    """Masks are arguments that are always there: requests without one get the same tokens beside others with."""
    free = [request for request in mixed if request.params.grammar is None]
    compiled = tiny_model.runner.serving_compilations
    with_masks = run(tiny_model.engine(), mixed)
    without = run(tiny_model.engine(), free)
    assert tiny_model.runner.serving_compilations == compiled
    for key, outcome in without.items():
        assert outcome.token_ids == with_masks[key].token_ids


def test_requests_with_grammars_can_be_recorded() -> None:
    import msgspec

    request = GenerationRequest("r", (1, 2), dataclasses.replace(ask("x", 3, 4).params, grammar=DIGITS))
    assert msgspec.json.decode(msgspec.json.encode(request), type=GenerationRequest) == request
