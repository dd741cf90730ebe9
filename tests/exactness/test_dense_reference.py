"""Solo runs themselves, against plain attention over the whole sequence and numpy's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxserve.request import SamplingParams
from tests.engine_harness import NEAR_TIE, ask, prompt_ids, run
from tests.models.model_harness import sequence_logits

LogitsFn = Callable[[Sequence[int]], np.ndarray]


@pytest.fixture(scope="module")
def dense(tiny_model) -> LogitsFn:
    return sequence_logits(tiny_model.model_config, tiny_model.params)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def processed(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """The definitions: repetition counts prompt and output, presence and frequency the output alone, then bias."""
    out = logits.astype(np.float64)
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token in set(output):
        out[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    return out


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -0.5},
        {
            "repetition_penalty": 1.5,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.3,
            "logit_bias": {300: 6.0},
        },
    ],
)
def test_greedy_tokens_are_the_best_by_the_definition(tiny_model, dense, params):
    """B076, B078: at every step, from the first on; a prompt that repeats itself, and outputs that would."""
    words = prompt_ids("words", 3)
    prompt = [*words, *words, *words, words[0]]
    request = ask("penalised", prompt, 30, logprobs=1, **params)
    # A mate keeps the batch busy, so that rows and histories could be mixed up.
    outcome = run(tiny_model.engine(), [ask("mate", 4, 30, frequency_penalty=-2.0), request])["penalised", 0]
    logits_TV = dense([*prompt, *outcome.token_ids])
    for i, token in enumerate(outcome.token_ids):
        row = logits_TV[len(prompt) - 1 + i]
        score = processed(row, prompt, outcome.token_ids[:i], request.params)
        assert score[token] > score.max() - NEAR_TIE, f"token {i}"
        # Reported logprobs are the model's own, before any of it.
        assert abs(outcome.logprobs[i].logprob - log_softmax(row)[token]) < 1e-4


def test_presence_and_frequency_leave_the_first_token_alone(tiny_model, dense):
    """B076: the prompt is no output. A repetition penalty does count it."""
    prompt = [*prompt_ids("first", 12)] * 2
    logits = dense(prompt)[-1]
    # Biased so that it wins by less than a single count of any penalty.
    word = min(prompt, key=lambda token: logits[token])
    bias = {word: float(logits.max() - logits[word]) + 0.5}
    first = lambda **params: tiny_model.solo(ask("first", prompt, 1, logit_bias=bias, **params))[0].token_ids  # noqa: E731
    assert first() == [word]
    for name in ("presence_penalty", "frequency_penalty"):
        assert first(**{name: 2.0}) == [word]
    assert logits[word] < -0.6
    assert first(repetition_penalty=2.0) == [int(logits.argmax())]


def test_penalties_break_a_loop(tiny_model):
    """B078: tokens just generated count in the very next step."""
    loop = {"logit_bias": {777: 30.0}}
    assert set(tiny_model.solo(ask("loop", 5, 20, **loop))[0].token_ids) == {777}
    broken = tiny_model.solo(ask("broken", 5, 20, frequency_penalty=2.0, **loop))[0].token_ids
    assert 1 < broken.count(777) < 20


@pytest.mark.parametrize("together", [1, 2, 7, 16])
def test_scores_of_texts(tiny_model, dense, together):
    """B211: of whole texts, alone and in batches; no bias in the mean either."""
    texts = [prompt_ids(f"text{i}", 20 + 7 * i) for i in range(16)]
    differences = []
    for start in range(0, len(texts), together):
        engine = tiny_model.engine(enable_prefix_caching=False)
        batch = [
            ask(f"text{i}", texts[i], 0, prompt_logprobs=0)
            for i in range(start, min(start + together, len(texts)))
        ]
        for (name, _), outcome in run(engine, batch).items():
            ids = texts[int(name[4:])]
            expected = log_softmax(dense(ids))[np.arange(len(ids) - 1), list(ids[1:])]
            assert outcome.prompt_logprobs is not None
            differences.append(np.array([e.logprob for e in outcome.prompt_logprobs[1:]]) - expected)
    joined = np.concatenate(differences)
    assert np.abs(joined).max() < 1e-4
    assert abs(joined.mean()) < 1e-6


def test_decode_and_score_agree_at_every_position(tiny_model, dense):
    """B225: over blocks, chunks and buckets, to the end of the context."""
    prompt = prompt_ids("positions", 6)
    generated = tiny_model.solo(ask("decode", prompt, 240, logprobs=0))[0]
    text = [*prompt, *generated.token_ids]
    for chunk in (32, 7):
        engine = tiny_model.engine(max_prefill_chunk=chunk)
        scored = run(engine, [ask("score", text, 0, prompt_logprobs=0)])["score", 0].prompt_logprobs
        assert scored is not None
        score = np.array([entry.logprob for entry in scored[len(prompt) :] if entry])
        decode = np.array([entry.logprob for entry in generated.logprobs])
        assert np.abs(score - decode).max() < 1e-4
    exact = log_softmax(dense(text))[np.arange(len(prompt) - 1, len(text) - 1), generated.token_ids]
    assert np.abs(exact - decode).max() < 1e-4
