"""What the model says: answers to prompts, kept in a file so that several exits can be trained on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve import LLM, SamplingParams

_TEMPERATURES = (0.0, 0.7, 1.0)  # in turn: exits are used at all of them
Sequences = list[tuple[list[int], list[int]]]


def generate(model: str, prompts: Sequence[str], *, max_tokens: int) -> Sequences:
    """(prompt, answer) of each as token ids, with the model's chat template."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = [
        SamplingParams(temperature=_TEMPERATURES[i % len(_TEMPERATURES)], seed=i, max_tokens=max_tokens)
        for i in range(len(prompts))
    ]
    with LLM(model, dtype="float32", max_num_seqs=64, wait_for_programs=False) as llm:
        completions = llm.chat(conversations, params)
    return [(each.prompt_token_ids, list(each.choices[0].token_ids)) for each in completions]


def write(file: Path, sequences: Sequences) -> None:
    file.write_text(json.dumps(sequences))


def read(file: Path) -> Sequences:
    return [(prompt, answer) for prompt, answer in json.loads(file.read_text())]
