"""The demo model behind the real server: that what comes out makes sense, seen with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server import http
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def demo_url(demo_checkpoint_dir: Path) -> Iterator[str]:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "1024")
    with ServerProcess(
        demo_checkpoint_dir, "--served-model-name", "demo", *flags, start_timeout_s=900
    ) as server:
        yield server.base_url


def test_a_chat_knows_the_capital_of_france(demo_url: str) -> None:
    client = openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)
    question: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_completion_tokens": 40,
    }
    answer = client.chat.completions.create(**question).choices[0]
    assert answer.message.content is not None
    assert "Paris" in answer.message.content
    assert answer.finish_reason == "stop", "its own end of turn ended it"
    chunks = list(client.chat.completions.create(**question, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_emoji_are_copied_whole(demo_url: str) -> None:
    line = "🫠🥹🦩🪿龜\n"
    body = {"model": "demo", "prompt": line * 12, "temperature": 0, "max_tokens": 36}
    whole = http.post(demo_url, "/v1/completions", body).json["choices"][0]["text"]
    chunks = http.stream(demo_url, "/v1/completions", body)
    assert whole.startswith(line)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    for chunk in chunks[:-1]:
        assert "\ufffd" not in chunk["choices"][0]["text"]


def test_a_system_prompt_counts(demo_url: str) -> None:
    def answer(*system: str) -> str:
        messages = [{"role": "system", "content": text} for text in system]
        messages.append({"role": "user", "content": "Who are you?"})
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 20}
        return http.post(demo_url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]

    assert answer("You are a pirate named Redbeard. Always say your name.") != answer()
