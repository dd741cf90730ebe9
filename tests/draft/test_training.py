"""`scripts/train_draft`: what it asks, and that training brings an exit nearer to its model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.models.random_weights import init_random
from scripts.draft.examples import Examples, make_examples
from scripts.draft.prompts import prompts
from scripts.draft.train import Schedule, frequent_tokens, train_exit
from tests.exits import exit_shape

pytestmark = pytest.mark.usefixtures("quick_to_compile")

MODEL = ModelConfig("LlamaForCausalLM", 96, 32, 64, 3, 4, 2, 8, 128, tie_word_embeddings=True)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples() -> Examples:
    """Of a model whose later layers matter."""
    rng = np.random.default_rng(0)
    texts = [
        (rng.integers(0, 96, 5).tolist(), rng.integers(0, 96, int(length)).tolist())
        for length in rng.integers(20, 27, 400)
    ]
    params = init_random(MODEL, jnp.float32)
    for layer in params["layers"].values():
        layer["mlp"]["down_proj"]["kernel"] *= 3
    return make_examples(MODEL, params, texts, num_layers=1)


def test_prompts() -> None:
    made = prompts(3, 300)
    assert len(set(made)) == 300
    assert made[:50] == prompts(3, 50)
    assert made != prompts(4, 300)
    asked = json.loads((REPOSITORY / "workloads" / "speculation.json").read_text())
    questions = {message for kind in asked.values() for message in kind["messages"]}
    assert not questions & set(prompts(1, 3000)), "an exit must not be trained on what it is measured by"


def test_frequent_tokens() -> None:
    counts = np.array([9] * 5 + [4] * 2 + [7])
    assert frequent_tokens(counts, 12, 2).tolist() == [4, 9]
    assert frequent_tokens(counts, 12, 5).tolist() == [0, 1, 4, 7, 9]


def test_examples_are_the_models_own_states(examples: Examples) -> None:
    """The same text alone and among others; what it says next follows from the last state."""
    text = [*range(7)], [*range(50, 80)]
    alone = make_examples(MODEL, init_random(MODEL, jnp.float32), [text], num_layers=1)
    among = make_examples(MODEL, init_random(MODEL, jnp.float32), [([1], [2, 3, 4]), text], num_layers=1)
    second = among.texts_N == 1
    assert alone.token_ids_N.tolist() == [*range(1, 7), *range(50, 80)]
    assert alone.is_answer_N.tolist() == [False] * 6 + [True] * 30
    assert np.allclose(alone.early_ND, among.early_ND[second], atol=1e-5)
    assert np.allclose(alone.final_ND, among.final_ND[second], atol=1e-4)
    assert not np.allclose(alone.early_ND, alone.final_ND, atol=0.1)


def test_training_improves_agreement(examples: Examples) -> None:
    """Beyond the regression, and that beyond the model's own head, on texts that it has not seen."""
    lines: list[str] = []
    held_out = np.asarray(examples.texts_N % 8 == 7)
    early_ND, head_VD = examples.early_ND[held_out], examples.head_VD
    best_N = np.argmax(examples.final_ND[held_out] @ head_VD.T, -1)
    own_head = (np.argmax(early_ND @ head_VD.T, -1) == best_N).mean()
    shape = exit_shape(MODEL, num_tokens=64, inner_size=64)
    schedule = Schedule(epochs=6, batch_size=64, learning_rate=3e-3)
    params, after = train_exit(examples, shape, schedule, held_out=held_out, announce=lines.append)
    _, before = train_exit(examples, shape, replace(schedule, epochs=0), held_out=held_out)
    assert before.whole > own_head + 0.05, (own_head, before)
    assert after.first > before.first + 0.05, (before, after)
    assert after.second > before.second + 0.05, (before, after)
    assert after.first <= after.coverage < 1
    assert len(lines) == 7
    assert params["token_ids"].dtype == jnp.int32
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
