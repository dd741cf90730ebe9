"""Tool calls in the shapes of /v1/responses and /v1/messages, with the clients of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server import http
from tests.server.running_server import RunningServer
from tests.server.scripted_engine import ScriptedEngine
from tests.tool_calls.families import family, tool

ARGUMENTS = {"city": 'Ålesund "}', "days": 2}
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
SCRIPT = "Let me see.\n" + CALLS
FUNCTIONS: list[Any] = [tool("get_weather")["function"], tool("get_time")["function"]]
FUNCTION_TOOLS: Any = [{"type": "function", **function} for function in FUNCTIONS]
CLIENT_TOOLS: Any = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in FUNCTIONS
]
USER: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(family("hermes"))


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    with RunningServer(engine) as running:
        yield running


def test_responses(server: RunningServer, engine: ScriptedEngine) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
    request: Any = {"model": "copy", "input": USER, "tools": FUNCTION_TOOLS}
    engine.scripts = (SCRIPT,)
    whole = client.responses.create(**request)
    _, weather, time = whole.output
    assert whole.output_text == "Let me see.\n"
    assert (weather.type, weather.name, json.loads(weather.arguments)) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
    )  # type: ignore[union-attr]
    assert (time.type, time.name, time.arguments) == ("function_call", "get_time", "{}")  # type: ignore[union-attr]
    assert [item.status for item in whole.output] == ["completed"] * 3  # type: ignore[union-attr]
    assert len({item.id for item in whole.output}) == 3
    assert weather.call_id != time.call_id  # type: ignore[union-attr]
    assert [one.name for one in whole.tools] == ["get_weather", "get_time"]  # type: ignore[union-attr]

    with client.responses.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [(item.type, getattr(item, "arguments", None)) for item in final.output] == [
        (item.type, getattr(item, "arguments", None)) for item in whole.output
    ]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    for event in done:
        assert "".join(one.delta for one in deltas if one.item_id == event.item_id) == event.arguments

    history: Any = [
        *USER,
        *[item.model_dump(exclude_none=True) for item in whole.output[:2]],
        {"type": "function_call_output", "call_id": weather.call_id, "output": "rain"},  # type: ignore[union-attr]
    ]
    engine.scripts = ("It rains.",)
    after = client.responses.create(**{**request, "input": history})
    assert after.output_text == "It rains."
    assert engine.prompt.count("Let me see.") == 1
    assert '"days": 2' in engine.prompt
    assert "<tool_response>rain" in engine.prompt.replace("\n", "")
    hidden = client.responses.create(**{**request, "tool_choice": "none"})
    assert hidden.output_text == "It rains."
    assert "get_weather" not in engine.prompt


def test_messages(server: RunningServer, engine: ScriptedEngine) -> None:
    client = anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0)
    request: Any = {"model": "copy", "messages": USER, "tools": CLIENT_TOOLS, "max_tokens": 500}
    engine.scripts = (SCRIPT,)
    whole = client.messages.create(**request)
    text, weather, time = whole.content
    assert whole.stop_reason == "tool_use"
    assert (text.type, text.text) == ("text", "Let me see.\n")  # type: ignore[union-attr]
    assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", ARGUMENTS)  # type: ignore[union-attr]
    assert (time.type, time.name, time.input) == ("tool_use", "get_time", {})  # type: ignore[union-attr]
    with client.messages.stream(**request) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [getattr(one, "input", None) for one in final.content] == [None, ARGUMENTS, {}]
    reply = http.post(server.base_url, "/v1/messages", {**request, "stream": True})
    events = http.named_events(reply.body)
    started = [data["index"] for name, data in events if name == "content_block_start"]
    stopped = [data["index"] for name, data in events if name == "content_block_stop"]
    assert started == stopped == [0, 1, 2]

    counted = client.messages.count_tokens(model="copy", messages=USER, tools=CLIENT_TOOLS)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    history: Any = [
        *USER,
        {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in whole.content[:2]]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": weather.id,
                    "content": [{"type": "text", "text": "rain"}],
                },  # type: ignore[union-attr]
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    engine.scripts = ("It rains.",)
    after = client.messages.create(**{**request, "messages": history})
    assert after.stop_reason == "end_turn"
    assert after.content[0].text == "It rains."  # type: ignore[union-attr]
    prompt = engine.prompt.replace("\n", "")
    assert prompt.index('"days": 2') < prompt.index("<tool_response>rain") < prompt.index("And now?")
    client.messages.create(**{**request, "tool_choice": {"type": "none"}})
    assert "get_weather" not in engine.prompt


def test_nothing_but_calls_and_calls_that_are_cut(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.scripts = (CALLS,)
    one: Any = {"model": "copy", "input": "Hi", "tools": FUNCTION_TOOLS, "parallel_tool_calls": False}
    output = http.post(server.base_url, "/v1/responses", one).json["output"]
    assert [item["type"] for item in output] == ["function_call"]
    cut = http.post(server.base_url, "/v1/responses", {**one, "max_output_tokens": 24}).json
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    body = {"model": "copy", "messages": USER, "tools": CLIENT_TOOLS, "max_tokens": 24}
    message = http.post(server.base_url, "/v1/messages", body).json
    assert message["stop_reason"] == "max_tokens"
    [block] = message["content"]
    assert block["input"] == {"INVALID_JSON": cut["output"][0]["arguments"]}
    single = {**body, "max_tokens": 500, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len(http.post(server.base_url, "/v1/messages", single).json["content"]) == 1


RESPONSES_BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION_TOOLS[0], "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    (
        {"input": [*USER, {"type": "function_call", "call_id": "a", "name": "get_time", "arguments": "["}]},
        "input[1].arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), RESPONSES_BAD)
def test_what_is_wrong_with_responses_is_named(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "copy", "input": USER, "tools": FUNCTION_TOOLS, **fields}
    reply = http.post(server.base_url, "/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, param)


USE = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
MESSAGES_BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{**CLIENT_TOOLS[0], "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**CLIENT_TOOLS[0], "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
    ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
]


@pytest.mark.parametrize(("fields", "mention"), MESSAGES_BAD)
def test_what_is_wrong_with_messages_is_said(
    server: RunningServer, fields: dict[str, Any], mention: str
) -> None:
    body = {"model": "copy", "messages": USER, "tools": CLIENT_TOOLS, "max_tokens": 9, **fields}
    reply = http.post(server.base_url, "/v1/messages", body)
    assert reply.status == 400
    assert mention in reply.json["error"]["message"]


def test_required_tools_become_a_grammar(server: RunningServer, engine: ScriptedEngine) -> None:
    """What it makes of outputs is seen in test_forced_tool_calls.py; it is the chat's."""
    for path, body in (
        ("/v1/responses", {"input": USER, "tools": FUNCTION_TOOLS, "tool_choice": "required"}),
        (
            "/v1/messages",
            {"messages": USER, "tools": CLIENT_TOOLS, "max_tokens": 9, "tool_choice": {"type": "any"}},
        ),
    ):
        assert http.post(server.base_url, path, {"model": "copy", **body}).status == 200
        assert "call_1" in engine.params.grammar.text
