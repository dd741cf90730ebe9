from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from jaxserve.outputs import RequestOutput
from jaxserve.server.responses import ChunkBuilder
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture
def core(tokenizer: Tokenizer) -> CopyEngine:
    return CopyEngine(tokenizer)


@pytest.fixture
def server(core: CopyEngine) -> Iterator[RunningServer]:
    with RunningServer(core) as running:
        yield running


def completion(prompt: Any = "Hello world", **fields: Any) -> dict[str, Any]:
    return {"model": "copy", "prompt": prompt, **fields}


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "copy", "messages": [{"role": "user", "content": content}], **fields}


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def texts(chunks: list[Any], *, is_chat: bool) -> dict[int, str]:
    """The text of each choice; checks how choices begin and end on the way."""
    result: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ended, "something came after the end of a choice"
            delta = choice["delta"].get("content", "") if is_chat else choice["text"]
            if is_chat:
                assert ("role" in choice["delta"]) == (index not in result)
            result[index] = result.get(index, "") + delta
            if choice["finish_reason"] is not None:
                ended.add(index)
    assert ended == set(result)
    return result


EMOJI = "🫠🥹🦩🪿龜 é\u0301 👩‍👩‍👧\n"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, completion(EMOJI * 3, max_tokens=40)),
    (COMPLETIONS, completion(EMOJI, max_tokens=9, echo=True, logprobs=2)),
    (COMPLETIONS, completion(["one two", EMOJI], n=2, max_tokens=12, logprobs=0, return_token_ids=True)),
    (COMPLETIONS, completion("a b c d", max_tokens=7, prompt_logprobs=1)),
    (COMPLETIONS, completion("one two three", stop=["three", "zzz"], max_tokens=30)),
    (COMPLETIONS, completion("one\n\n two\n\n", stop=["\n\n###"], max_tokens=2)),
    (COMPLETIONS, completion("one two", max_tokens=0)),
    (COMPLETIONS, completion("one two", max_tokens=0, echo=True, logprobs=1)),
    (COMPLETIONS, completion("one two", max_tokens=1)),
    (CHAT, chat(EMOJI, max_tokens=60)),
    (CHAT, chat(EMOJI, max_tokens=60, logprobs=True, top_logprobs=2)),
    (CHAT, chat(n=3, max_completion_tokens=8)),
    (CHAT, chat(stop="helpful", max_tokens=50, include_stop_str_in_output=True)),
    (CHAT, chat(max_tokens=0)),
    (CHAT, chat(stop_token_ids=[1], max_tokens=5)),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_streamed_answer_is_the_whole_one(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    whole = http.post(server.base_url, path, body).json
    chunks = http.stream(server.base_url, path, {**body, "stream_options": {"include_usage": True}})
    is_chat = path == CHAT
    *choices, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in choices)
    joined = texts(choices, is_chat=is_chat)
    for choice in whole["choices"]:
        mine = [c for chunk in choices for c in chunk["choices"] if c["index"] == choice["index"]]
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert joined[choice["index"]] == text
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content"):
            if choice["logprobs"] is not None and name in choice["logprobs"]:
                streamed = [x for c in mine if c["logprobs"] is not None for x in c["logprobs"].get(name, [])]
                assert streamed == choice["logprobs"][name], name
        for name in ("token_ids", "prompt_token_ids"):
            if name in choice:
                assert [x for c in mine for x in c.get(name, [])] == choice[name]
        assert [c["prompt_logprobs"] for c in mine if "prompt_logprobs" in c] == (
            [choice["prompt_logprobs"]] if "prompt_logprobs" in choice else []
        )
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_usage_is_sent_only_where_asked_for(server: RunningServer) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        chunks = http.stream(server.base_url, CHAT, chat(max_tokens=3, stream_options=options))
        assert all(chunk["choices"] for chunk in chunks)
        assert all(chunk.get("usage") is None for chunk in chunks)


def test_no_delta_shows_half_a_character(server: RunningServer) -> None:
    chunks = http.stream(server.base_url, COMPLETIONS, completion("🫠🥹🦩🪿" * 10, max_tokens=200))
    text = texts(chunks, is_chat=False)[0]
    assert text.rstrip("\ufffd").strip("🫠🥹🦩🪿") == ""
    for chunk in chunks[:-1]:
        assert "\ufffd" not in chunk["choices"][0]["text"]


def test_many_streams_at_once_are_complete_and_in_order(server: RunningServer, tokenizer: Tokenizer) -> None:
    def one(number: int) -> None:
        prompt = tokenizer.encode(f"Number {number} is a number between zero and many others.")
        wanted = (1, 2, 3, 17)[number % 4]
        body = completion(prompt, max_tokens=wanted, logprobs=0, return_token_ids=True)
        chunks = http.stream(
            server.base_url, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}
        )
        ids = [token for chunk in chunks[:-1] for token in chunk["choices"][0]["token_ids"]]
        assert ids == [prompt[i % len(prompt)] for i in range(wanted)]
        assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks[:-1]) == wanted
        assert chunks[-1]["usage"]["completion_tokens"] == wanted

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(96)))


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_fails_is_an_error_and_the_others_go_on(
    server: RunningServer, core: CopyEngine, stream: bool
) -> None:
    core.break_next = True
    reply = http.post(server.base_url, CHAT, chat(max_tokens=5, n=2, stream=stream))
    if stream:
        assert reply.status == 200
        error = json.loads(reply.body.rstrip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]
        assert b"[DONE]" not in reply.body
    else:
        assert reply.status == 500
        error = reply.error
    assert error["message"] == "logits are not finite"
    assert http.post(server.base_url, CHAT, chat(max_tokens=5)).status == 200
    until(lambda: not core.has_work())


def wait_for_phase(core: CopyEngine, server: RunningServer, phase: str) -> dict[str, Any]:
    """Bring the engine to where the next request stays in `phase`; the body that does."""
    if phase == "before the first token":
        core.may_step.clear()
    elif phase == "queued":
        core.max_running = 1
        core.step_seconds = 0.01
        other = completion("other", max_tokens=10_000, stream=True)
        blocker = http.open_socket(server.base_url, COMPLETIONS, other)
        until(lambda: len(core.submitted) == 1)
        server.blocker = blocker  # type: ignore[attr-defined]  # stays open as long as the server
    else:
        core.step_seconds = 0.01
    return completion("mine", max_tokens=10_000)


PHASES = ("queued", "before the first token", "decoding")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_goes_away_is_noticed(
    server: RunningServer,
    core: CopyEngine,
    phase: str,
    how: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {**wait_for_phase(core, server, phase), "stream": stream}
    before = server.engine.num_open
    sock = http.open_socket(server.base_url, COMPLETIONS, body)
    until(lambda: server.engine.num_open == before + 1)
    if phase == "decoding" and stream:
        assert sock.recv(100)
    else:
        time.sleep(0.1)
    if how == "reset":
        http.reset(sock)
    else:
        sock.close()
    until(lambda: server.engine.num_open == before, seconds=1.0)
    core.may_step.set()
    until(lambda: len(core.aborted) == 1, seconds=1.0)
    assert b'finished_reason="abort",model_name="copy"} 1.0' in server.server.metrics.render()
    assert "Traceback" not in caplog.text


def test_the_log_names_the_stream_that_failed_unforeseen(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(builder: ChunkBuilder, output: RequestOutput) -> Any:
        raise RuntimeError("internal detail")

    monkeypatch.setattr(ChunkBuilder, "chunks", fail)
    body = completion(stream=True, max_tokens=2)
    reply = http.post(server.base_url, COMPLETIONS, body, headers={"X-Request-Id": "id-of-this-one"})
    assert b"internal_error" in reply.body
    assert b"detail" not in reply.body
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "id-of-this-one" in record.getMessage()


def test_a_slow_reader_holds_up_nobody_and_keeps_little(server: RunningServer, core: CopyEngine) -> None:
    core.step_seconds = 0.002
    process = psutil.Process()
    body = completion("word " * 200, max_tokens=1500, logprobs=20, stream=True)
    slow = [http.open_socket(server.base_url, COMPLETIONS, body, receive_buffer=4096) for _ in range(10)]
    until(lambda: server.engine.num_open == 10)
    before = process.memory_info().rss
    chunks = http.stream(server.base_url, COMPLETIONS, completion("word " * 200, max_tokens=1500))
    assert len(chunks) > 500  # it was served token by token, not held up
    until(lambda: not core.has_work(), seconds=20)
    # 10 clients x 1500 tokens x 21 logprobs, at most about 100 bytes each.
    assert process.memory_info().rss - before < 60e6
    # The quick one's stream may close a moment after its last byte.
    until(lambda: server.engine.num_open <= 10)
    assert server.engine.num_open == 10, "nobody was cut off"
    for sock in slow[:-1]:
        http.reset(sock)
    until(lambda: server.engine.num_open == 1, seconds=2.0)
    raw = b""
    while data := slow[-1].recv(65536):
        raw += data
        if raw.endswith(b"0\r\n\r\n"):
            break
    assert raw.count(b"data: [DONE]") == 1, "the patient one gets everything"
    slow[-1].close()


def test_half_a_close_may_go_on_or_abort_but_never_leaks(server: RunningServer, core: CopyEngine) -> None:
    core.step_seconds = 0.005
    sock = http.open_socket(server.base_url, COMPLETIONS, completion("mine", max_tokens=50, stream=True))
    until(lambda: server.engine.num_open == 1)
    sock.shutdown(socket.SHUT_WR)
    until(lambda: server.engine.num_open == 0, seconds=5.0)
    until(lambda: not core.has_work())
    sock.close()


def test_a_death_ends_open_streams_with_an_error(server: RunningServer, core: CopyEngine) -> None:
    core.step_seconds = 0.01
    replies: list[http.Reply] = []
    bodies = [completion("mine", max_tokens=10_000, stream=stream) for stream in (True, False)]
    threads = [
        threading.Thread(target=lambda b=body: replies.append(http.post(server.base_url, COMPLETIONS, b)))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    until(lambda: server.engine.num_open == 2)
    time.sleep(0.1)
    core.fail_with = RuntimeError("device lost")
    for thread in threads:
        thread.join(5)
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [200, 503]
    streamed = next(reply for reply in replies if reply.status == 200)
    last = json.loads(streamed.body.rstrip().split(b"\n\n")[-1].removeprefix(b"data: "))
    assert last["error"]["code"] == "engine_dead"
    assert b"[DONE]" not in streamed.body
    for path in ("/health", "/ready"):
        assert http.request(server.base_url, "GET", path).status == 503
    assert http.post(server.base_url, CHAT, chat()).error["code"] == "engine_dead"


def test_a_shutdown_lets_streams_end(server: RunningServer, core: CopyEngine) -> None:
    core.step_seconds = 0.01
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.stream, server.base_url, COMPLETIONS, completion("a b c", max_tokens=100))
        until(lambda: server.engine.num_open == 1)
        server.drain(30)
        until(lambda: http.request(server.base_url, "GET", "/health").status == 503)
        for refused in (
            http.post(server.base_url, CHAT, chat()),
            http.request(server.base_url, "GET", "/ready"),
        ):
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert running.result(10)[-1]["choices"][0]["finish_reason"] == "length"


def test_what_outlives_the_grace_ends_with_an_error(server: RunningServer, core: CopyEngine) -> None:
    core.step_seconds = 0.01
    with ThreadPoolExecutor(1) as pool:
        body = completion("a b c", max_tokens=100_000, stream=True)
        running = pool.submit(http.post, server.base_url, COMPLETIONS, body)
        until(lambda: server.engine.num_open == 1)
        server.drain(0.2)
        last = running.result(10).body.rstrip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    until(lambda: not core.has_work())


def test_a_client_that_goes_away_between_two_writes_is_no_error_of_ours(
    server: RunningServer, core: CopyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The first write to a closed socket fails silently; a second one before the loop knows raises."""
    core.step_seconds = 0.0
    for how in ("close", "reset") * 10:
        sock = http.open_socket(
            server.base_url, COMPLETIONS, completion("mine", max_tokens=1900, stream=True)
        )
        assert sock.recv(100)
        http.reset(sock) if how == "reset" else sock.close()
        until(lambda: server.engine.num_open == 0, seconds=1.0)
    assert "Traceback" not in caplog.text
