from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer


@pytest.fixture(scope="module")
def url(tokenizer: Tokenizer) -> Iterator[str]:
    with RunningServer(CopyEngine(tokenizer)) as server:
        yield server.base_url


def ask(url: str, path: str, **body: Any) -> Any:
    reply = http.post(url, path, body)
    assert reply.status == 200, reply.body
    return reply.json


SPELLED = st.characters(min_codepoint=0x20, max_codepoint=0x7E) | st.sampled_from("äéπ龜🫠\n")


@given(text=st.text(SPELLED, max_size=30))
@settings(max_examples=30, deadline=None)
def test_text_comes_back(url: str, text: str) -> None:
    tokens = ask(url, "/tokenize", prompt=text)
    assert tokens["count"] == len(tokens["tokens"])
    assert (tokens["max_model_len"], tokens["token_strs"]) == (2048, None)
    assert ask(url, "/detokenize", tokens=tokens["tokens"])["prompt"] == text


def test_a_conversation_has_the_tokens_that_a_chat_counts(url: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi <|im_end|>"}], "name": "ann"}]
    counted = ask(url, "/v1/chat/completions", model="copy", messages=messages, max_tokens=1)["usage"]
    tokens = ask(url, "/tokenize", messages=messages, return_token_strs=True)
    assert tokens["count"] == counted["prompt_tokens"]
    assert "".join(tokens["token_strs"]) == ask(url, "/detokenize", tokens=tokens["tokens"])["prompt"]
    assert tokens["token_strs"].count("<|im_end|>") < "".join(tokens["token_strs"]).count("<|im_end|>")
    closed = ask(url, "/tokenize", messages=messages, add_generation_prompt=False)
    assert closed["tokens"] == tokens["tokens"][: closed["count"]]
    assert closed["count"] < tokens["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "word " * 100_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(url: str, path: str, body: dict[str, Any], param: str) -> None:
    reply = http.post(url, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_another_model_is_not_found(url: str) -> None:
    assert http.post(url, "/tokenize", {"prompt": "a", "model": "other"}).error["code"] == "model_not_found"
    assert http.post(url, "/tokenize", {"prompt": "a", "model": "copy"}).status == 200


def test_many_at_once_beside_chats(url: str) -> None:
    """B157: they share one tokenizer."""
    with ThreadPoolExecutor(16) as pool:
        bodies = [{"prompt": f"some words {i} " * (i + 1)} for i in range(50)]
        found = list(pool.map(lambda body: ask(url, "/tokenize", **body)["tokens"], bodies))
    assert found == [ask(url, "/tokenize", **body)["tokens"] for body in bodies]
