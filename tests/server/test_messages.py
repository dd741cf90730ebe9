"""`POST /v1/messages`: with the anthropic client, and byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "one two three four five six seven"}]


@pytest.fixture(scope="module")
def core(tokenizer: Tokenizer) -> CopyEngine:
    return CopyEngine(tokenizer)


@pytest.fixture(scope="module")
def server(core: CopyEngine) -> Iterator[RunningServer]:
    options = ServerOptions(keys=make_api_keys([("someone", "sesame")]))
    with RunningServer(core, options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key="sesame", max_retries=0)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "copy", "messages": USER, "max_tokens": 5, **fields}


def post(server: RunningServer, **fields: Any) -> http.Reply:
    return http.post(server.base_url, MESSAGES, body(**fields), headers={"X-Api-Key": "sesame"})


def test_a_whole_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**body(system="Be brief."), extra_body={"temperature": 0.5, "top_k": 3})
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "copy")
    assert answer.id.startswith("msg_")
    assert answer._request_id
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    [block] = answer.content
    assert block.type == "text"
    assert block.text
    usage = answer.usage
    counted = client.messages.count_tokens(model="copy", system="Be brief.", messages=USER)  # type: ignore[arg-type]
    assert usage.output_tokens == 5
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    plain = client.messages.create(**body())
    assert plain.usage.input_tokens != counted.input_tokens, "the system prompt counts"


def test_a_stream_is_the_whole_message(client: anthropic.Anthropic, server: RunningServer) -> None:
    whole = client.messages.create(**body(max_tokens=20))
    with client.messages.stream(**body(max_tokens=20)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    events = http.named_events(post(server, stream=True, max_tokens=20).body)
    names = [name for name, _ in events]
    assert names == [data["type"] for _, data in events]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["content"] == []
    assert events[0][1]["message"]["usage"]["input_tokens"] > 0


def test_how_a_message_ends(client: anthropic.Anthropic, core: CopyEngine) -> None:
    text = client.messages.create(**body(max_tokens=20)).content[0].text  # type: ignore[union-attr]
    word = text.split()[3]
    stopped = client.messages.create(**body(max_tokens=20, stop_sequences=[word]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text  # type: ignore[union-attr]
    with client.messages.stream(**body(max_tokens=20, stop_sequences=[word])) as stream:
        assert stream.get_final_message().stop_sequence == word


def test_blocks_prefill_and_users(client: anthropic.Anthropic, server: RunningServer) -> None:
    def count(*messages: dict[str, Any]) -> int:
        return client.messages.count_tokens(model="copy", messages=list(messages)).input_tokens  # type: ignore[arg-type]

    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert count({"role": "user", "content": [block, block]}) == count({"role": "user", "content": "a\na"})
    asked, begun = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}
    assert count(asked, begun) < count(asked, begun, asked)
    assert post(server, messages=[asked, begun], metadata={"user_id": "ann"}).status == 200


@pytest.mark.parametrize(
    ("fields", "mention"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"system": "s", "messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"stop_sequences": [""]}, "stop_sequences must not"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must"),
        ({"tools": [{"name": "a", "input_schema": {"type": "null"}}]}, "tools[0].input_schema must"),
        ({"stop_sequences": ["a" * 2000]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"name": "a"}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"other": 1}, "other"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_shape(
    server: RunningServer, fields: dict[str, Any], mention: str
) -> None:
    reply = post(server, **fields)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert mention in reply.json["error"]["message"]


def test_errors_have_the_clients_types(client: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**body(model="other"))
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**body())


def test_a_stream_that_fails_ends_with_an_error_event(
    client: anthropic.Anthropic, core: CopyEngine, server: RunningServer
) -> None:
    core.break_next = True
    events = http.named_events(post(server, stream=True).body)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "api_error"
    core.break_next = True
    with pytest.raises(anthropic.APIStatusError), client.messages.stream(**body()) as stream:
        stream.get_final_message()
    core.break_next = True
    assert post(server).json["error"]["type"] == "api_error"


def test_a_shutdown_is_told(tokenizer: Tokenizer) -> None:
    core = CopyEngine(tokenizer, step_seconds=0.01)
    with RunningServer(core) as running:
        sock = http.open_socket(running.base_url, MESSAGES, body(stream=True, max_tokens=1500))
        while not core.submitted:
            pass
        running.drain(0.1)
        data = b""
        while piece := sock.recv(65536):
            data += piece
            if b"event: error" in data:
                break
        assert b'"overloaded_error"' in data
        assert b"message_stop" not in data
        reply = http.post(running.base_url, MESSAGES, body())
        assert (reply.status, reply.json["error"]["type"]) == (503, "overloaded_error")
        assert reply.headers["retry-after"]
        sock.close()
