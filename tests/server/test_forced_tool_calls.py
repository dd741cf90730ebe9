"""Required and named calls, of a real server process, whose model is random: what comes is what the grammar leaves."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server import http
from tests.tool_calls.families import tool

CHAT = "/v1/chat/completions"
SHORT = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [tool("get_weather", **SHORT), {"type": "function", "function": {"name": "get_time"}}]
USER: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(api_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0)


def check(calls: Any, *names: str) -> None:
    assert calls
    for one in calls:
        assert one.type == "function"
        assert one.function.name in names
        arguments = json.loads(one.function.arguments)
        if one.function.name == "get_weather":
            assert arguments.pop("city") in ("Oslo", "Rome")
            assert 1 <= arguments.pop("days", 1) <= 5
        assert not arguments


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_required_calls(client: openai.OpenAI, temperature: float) -> None:
    request: Any = {
        **{"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required"},
        **{"temperature": temperature, "seed": 5, "max_tokens": 200, "parallel_tool_calls": False},
    }
    choice = client.chat.completions.create(**request).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    check(choice.message.tool_calls, "get_weather", "get_time")
    assert len(choice.message.tool_calls or ()) == 1
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    [whole], [streamed] = choice.message.tool_calls or (), final.message.tool_calls or ()
    assert streamed.function.name == whole.function.name  # type: ignore[union-attr]
    assert streamed.function.arguments == whole.function.arguments  # type: ignore[union-attr]


def test_choices_of_their_own_and_several_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="required", n=4, seed=1, max_tokens=300
    )
    for choice in answer.choices:
        assert choice.finish_reason in ("tool_calls", "length")
        if choice.finish_reason == "tool_calls":
            check(choice.message.tool_calls, "get_weather", "get_time")
    assert any(choice.finish_reason == "tool_calls" for choice in answer.choices)


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_call(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    answer = client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice=choice, max_tokens=200, seed=3
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    check(answer.choices[0].message.tool_calls, name)
    assert len(answer.choices[0].message.tool_calls or ()) == 1


def test_schemas_that_can_not_be_enforced_are_refused_and_hurt_nobody(api_url: str) -> None:
    body = {"model": "tiny", "messages": USER, "tool_choice": "required", "max_tokens": 100}
    for parameters in (
        {"type": "object", "properties": {"a": {"type": "nothing"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"pattern": "("}}, "required": ["a"]},
    ):
        reply = http.post(api_url, CHAT, {**body, "tools": [tool("f", **parameters)]})
        assert reply.status == 400, reply.body
        assert reply.error["param"] == "tools"
        assert http.post(api_url, CHAT, {**body, "tools": TOOLS}).status == 200
    reply = http.post(api_url, CHAT, {**body, "tools": TOOLS, "response_format": {"type": "json_object"}})
    assert (reply.status, reply.error["param"]) == (400, "response_format")
