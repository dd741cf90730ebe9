"""`POST /v1/responses`: with the openai client, and byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

RESPONSES = "/v1/responses"
INPUT = "one two three four five six seven"


@pytest.fixture(scope="module")
def core(tokenizer: Tokenizer) -> CopyEngine:
    return CopyEngine(tokenizer)


@pytest.fixture(scope="module")
def url(core: CopyEngine) -> Iterator[str]:
    with RunningServer(core) as running:
        yield running.base_url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "copy", "input": INPUT, "max_output_tokens": 5, **fields}


def test_a_whole_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        **body(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, service_tier="flex")
    )
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.instructions, answer.metadata) == ("incomplete", "Be brief.", {"a": "b"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.temperature, answer.max_output_tokens, answer.service_tier) == (0.5, 5, "flex")
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": INPUT}]
    same = client.chat.completions.create(model="copy", messages=chat, max_completion_tokens=5)
    assert same.choices[0].message.content == answer.output_text
    assert same.usage is not None
    assert same.usage.prompt_tokens == answer.usage.input_tokens


def test_a_stream_is_the_whole_response(client: openai.OpenAI, url: str) -> None:
    arguments = body(max_output_tokens=20, include=["message.output_text.logprobs"], top_logprobs=2)
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response  # type: ignore[union-attr]
    assert (last.output_text, last.usage, last.status) == (whole.output_text, whole.usage, whole.status)
    part = whole.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) == 20  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr, index]
    assert sum(len(event.logprobs) for event in deltas) == 20
    raw = http.named_events(http.post(url, RESPONSES, {**arguments, "stream": True}).body)
    assert [name for name, _ in raw] == [data["type"] for _, data in raw]
    assert list(dict.fromkeys(name for name, _ in raw)) == list(dict.fromkeys(event.type for event in events))


def test_an_earlier_answer_is_taken_back(client: openai.OpenAI) -> None:
    first = client.responses.create(**body())
    again: Any = [
        {"role": "user", "content": INPUT},
        *[item.model_dump() for item in first.output],
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    second = client.responses.create(**body(input=again))
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 5
    simple: Any = [
        {"role": "user", "content": INPUT},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "go on"},
    ]
    assert client.responses.create(**body(input=simple)).usage == second.usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "word " * 100_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**40}, "max_output_tokens"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"other": 1}, "other"),
    ],
)
def test_what_is_wrong_is_named(url: str, fields: dict[str, Any], param: str) -> None:
    reply = http.post(url, RESPONSES, body(**fields))
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"max_output_tokens": 2**40}, "max_output_tokens must be"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name: there is another"),
    ],
)
def test_the_text_of_an_error_has_the_names_of_this_api(
    url: str, fields: dict[str, Any], begins: str
) -> None:
    message = http.post(url, RESPONSES, body(**fields)).error["message"]
    assert message.startswith(begins)
    assert "function" not in message
    assert "max_tokens" not in message


def test_a_stream_that_fails_says_so(url: str, core: CopyEngine) -> None:
    core.break_next = True
    events = http.named_events(http.post(url, RESPONSES, body(stream=True)).body)
    [(name, data)] = events
    assert (name, data["sequence_number"]) == ("response.failed", 0)
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"]["message"]
    core.break_next = True
    assert http.post(url, RESPONSES, body()).error["code"] == "generation_failed"
