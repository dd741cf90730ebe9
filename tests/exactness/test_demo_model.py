"""The same on the real model: SmolLM2-135M-Instruct in float32."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.request import GenerationRequest
from tests.engine_harness import ServedModel, ask, assert_as_solo, run

TEXT = (
    "The history of computing is older than the machines that we call computers today. Long before anybody built a "
    "circuit, people wrote down procedures: how to divide an inheritance, how to predict an eclipse, how to lay out a "
    "field after a flood. What changed in the twentieth century was not the wish to calculate but the speed of it, and "
    "with the speed came questions that nobody had asked before. Which problems can be solved at all? How long must "
    "one wait for an answer? Is there a machine that can imitate every other machine? "
)
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "¿Cuál es la capital de España? 🇪🇸",
]


@pytest.fixture(scope="module")
def requests(demo_model: ServedModel) -> list[GenerationRequest]:
    """Prompts of 5 to 300 tokens, greedy and sampled."""
    encode = demo_model.tokenizer.encode
    chats = [
        demo_model.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    long = encode(TEXT * 4)
    sampled = {"temperature": 0.8, "top_p": 0.9}
    return [
        *(ask(f"chat{i}", ids, 20, logprobs=1, ignore_eos=False) for i, ids in enumerate(chats)),
        ask("tiny", encode("The quick brown fox jumps")[:5], 24),
        ask("long", long[:300], 12, prompt_logprobs=0),
        ask("sampled", chats[1], 20, seed=11, **sampled),
        ask("choices", chats[1], 14, n=2, seed=12, presence_penalty=0.5, **sampled),
    ]


@pytest.mark.parametrize("slots", [3, 4])
def test_together(demo_model, requests, slots):
    """B208, B210."""
    engine = demo_model.engine(max_num_seqs=slots, enable_prefix_caching=slots == 4)
    assert_as_solo(demo_model, requests, run(engine, requests))


def test_in_small_chunks_after_others_with_the_same_beginning(demo_model, requests):
    engine = demo_model.engine(max_prefill_chunk=9)
    reordered = [requests[4], *requests[:4], *requests[5:]]
    outcomes = run(engine, reordered)
    assert_as_solo(demo_model, requests, outcomes)
    assert outcomes["choices", 1].num_cached_tokens > 0


def test_preempted(demo_model, requests):
    """B113: two answers outgrow the pool while others, sampled ones among them, come and go."""
    growing = [ask(f"grow{i}", requests[i].prompt_token_ids, 70) for i in range(2)]
    mates = requests[3:4] + requests[5:]
    engine = demo_model.engine(num_blocks=10)
    outcomes = run(engine, [*growing, *mates])
    assert engine.stats.preemptions > 0
    assert_as_solo(demo_model, [*growing, *mates], outcomes)


def test_decode_and_score_agree_at_every_position(demo_model):
    """B225, B211: 300 greedy tokens, scored again in one pass of chunks and beside mates."""
    prompt = demo_model.tokenizer.encode_chat(
        [{"role": "user", "content": "Tell me a long story about a fox."}]
    )
    generated = demo_model.solo(ask("decode", prompt, 300, logprobs=0))[0]
    text = [*prompt, *generated.token_ids]
    score = ask("score", text, 0, prompt_logprobs=0)
    mates = [ask("mate0", text[5:40], 30), ask("mate1", text[100:117], 30)]
    outcomes = run(demo_model.engine(), [*mates, score])
    scored = outcomes["score", 0].prompt_logprobs
    assert scored is not None
    differences = np.array(
        [a.logprob - b.logprob for a, b in zip(scored[len(prompt) :], generated.logprobs, strict=True) if a]
    )
    assert np.abs(differences).max() < 1e-4, f"at {np.abs(differences).argmax()}"
