from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.cors import check_origin
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer
from tests.text_models import smollm2_with_template

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"model": "copy", "prompt": "Hello world", "max_tokens": 4}
ORIGIN = {"Origin": "https://example.org"}


@pytest.fixture(scope="module")
def core(tokenizer: Tokenizer) -> CopyEngine:
    return CopyEngine(tokenizer)


@pytest.fixture(scope="module")
def base_url(core: CopyEngine) -> Iterator[str]:
    with RunningServer(core) as server:
        yield server.base_url


def test_everything_that_is_not_there_is_a_json_error(base_url: str) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/health", 405),
    ):
        reply = http.request(base_url, method, path)
        assert reply.status == status, (method, path)
        assert reply.error["type"] == "invalid_request_error"
    assert http.request(base_url, "GET", COMPLETIONS).headers["allow"] == "POST"


def test_models_tell_what_they_can_hold(base_url: str) -> None:
    (model,) = http.request(base_url, "GET", "/v1/models").json["data"]
    assert (model["id"], model["max_model_len"]) == ("copy", 2048)
    assert http.request(base_url, "GET", "/v1/models/copy").json == model
    assert http.request(base_url, "GET", "/version").json["version"]


def test_a_body_larger_than_the_context_can_need_is_refused(base_url: str) -> None:
    for headers, body in (
        ({}, b" " * 70_000_000),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 70_000_000)),
    ):
        reply = http.post(base_url, CHAT, body, headers=headers)
        assert reply.status == 413
        assert reply.error["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", b"not gzip"), ("gzip", gzip.compress(b"{}", mtime=0)[:-10]), ("deflate", b"\xff\xff")],
)
def test_a_body_that_does_not_decompress_is_refused(base_url: str, encoding: str, body: bytes) -> None:
    reply = http.post(base_url, CHAT, body, headers={"Content-Encoding": encoding})
    assert reply.status == 400
    assert reply.error


def test_a_compressed_body_is_read(base_url: str) -> None:
    body = gzip.compress(b'{"model": "copy", "prompt": "a", "max_tokens": 1}')
    assert http.post(base_url, COMPLETIONS, body, headers={"Content-Encoding": "gzip"}).status == 200


def test_the_server_answers_while_huge_bodies_come_in(base_url: str, core: CopyEngine) -> None:
    """Nothing that takes long runs on the event loop: health stays quick and a stream goes on."""
    core.step_seconds = 0.01
    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(http.stream, base_url, COMPLETIONS, {**BODY, "max_tokens": 300})
        bodies = [
            b'{"model": "copy", "prompt": "' + b"word " * (size // 5) + b'"}'
            for size in (5_000_000, 20_000_000)
        ]
        posts = [pool.submit(http.post, base_url, COMPLETIONS, body) for body in bodies]
        delays = []
        while not all(post.done() for post in posts):
            started = time.monotonic()
            assert http.request(base_url, "GET", "/health").status == 200
            delays.append(time.monotonic() - started)
            time.sleep(0.05)
        for post in posts:
            assert post.result().status in (400, 413)
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
    core.step_seconds = 0.0
    # Tokenising these would take many seconds; on the loop, one probe would have waited for all of it.
    assert max(delays) < 2.0


def test_a_model_without_a_chat_template_still_completes() -> None:
    """B155."""
    with RunningServer(CopyEngine(smollm2_with_template(None))) as server:
        for stream in (False, True):
            body = {"model": "copy", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            refused = http.post(server.base_url, CHAT, body)
            assert (refused.status, refused.error["code"]) == (400, "no_chat_template")
            assert http.post(server.base_url, COMPLETIONS, {**BODY, "stream": stream}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_chat_template_refuses_is_told_in_its_words(stream: bool) -> None:
    """B155: on every endpoint that uses it; whoever asks for nothing of the kind is served."""
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
        "{{ messages[-1].content }}"
    )
    user = {"role": "user", "content": "hi"}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "system", "content": "Be brief."}, user]},
        "/v1/responses": {"instructions": "Be brief.", "input": "hi"},
        "/v1/messages": {"system": "Be brief.", "messages": [user], "max_tokens": 2},
    }
    with RunningServer(CopyEngine(smollm2_with_template(source))) as server:
        for path, body in bodies.items():
            refused = http.post(server.base_url, path, {"model": "copy", "stream": stream, **body})
            assert refused.status == 400, path
            assert "no system turn here" in refused.json["error"]["message"]
        plain = {"model": "copy", "messages": [user], "max_tokens": 2, "stream": stream}
        assert http.post(server.base_url, CHAT, plain).status == 200


def test_two_thousand_characters_of_metadata_are_no_trouble(base_url: str) -> None:
    body = {**BODY, "metadata": {"a": "b" * 2000}, "user": "x" * 1000}
    assert http.post(base_url, COMPLETIONS, body).status == 200


def test_an_overloaded_server_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    core = CopyEngine(tokenizer, max_running=1, max_waiting=1, step_seconds=0.01)
    long = {**BODY, "max_tokens": 2000, "stream": True}
    with RunningServer(core) as server:
        socks = [http.open_socket(server.base_url, COMPLETIONS, long) for _ in range(2)]
        while len(core.submitted) < 2:
            time.sleep(0.01)
        for body in (BODY, {**BODY, "stream": True}, {**BODY, "n": 2}):
            reply = http.post(server.base_url, COMPLETIONS, body)
            assert reply.status == 429
            assert reply.headers["retry-after"] in ("1", "2")
            assert (reply.error["type"], reply.error["code"]) == ("server_overloaded", "queue_full")
        for sock in socks:
            sock.close()


def test_a_refusal_does_not_wait_for_a_step(tokenizer: Tokenizer) -> None:
    core = CopyEngine(tokenizer, max_running=1, max_waiting=1)
    long = {**BODY, "max_tokens": 2000, "stream": True}
    with RunningServer(core) as server:
        socks = [http.open_socket(server.base_url, COMPLETIONS, long) for _ in range(2)]
        while len(core.submitted) < 2:
            time.sleep(0.01)
        core.may_step.clear()  # no step ends from here on
        assert http.post(server.base_url, COMPLETIONS, BODY, timeout=20).status == 429
        core.may_step.set()
        for sock in socks:
            sock.close()


def test_every_client_of_an_overloaded_server_is_answered(tokenizer: Tokenizer) -> None:
    """B095: three waves of far more than can run and wait, streamed or not."""
    core = CopyEngine(tokenizer, max_running=4, max_waiting=4, step_seconds=0.005)
    with RunningServer(core) as server, ThreadPoolExecutor(64) as pool:
        for wave in range(3):
            bodies = [{**BODY, "max_tokens": 1 + index % 9, "stream": index % 2 == 0} for index in range(64)]
            replies = [pool.submit(http.post, server.base_url, COMPLETIONS, body) for body in bodies]
            statuses = [reply.result(30).status for reply in replies]
            assert set(statuses) == {200, 429}, wave
            assert 8 <= statuses.count(200) < 64


def test_requests_in_progress_are_limited(tokenizer: Tokenizer) -> None:
    core = CopyEngine(tokenizer, step_seconds=0.01)
    with RunningServer(core, ServerOptions(max_open_requests=1)) as server:
        sock = http.open_socket(server.base_url, COMPLETIONS, {**BODY, "max_tokens": 2000, "stream": True})
        while not core.submitted:
            time.sleep(0.01)
        assert http.post(server.base_url, COMPLETIONS, BODY).error["code"] == "queue_full"
        sock.close()


@pytest.fixture(scope="module")
def locked_url(tokenizer: Tokenizer) -> Iterator[str]:
    with RunningServer(
        CopyEngine(tokenizer), ServerOptions(keys=make_api_keys([("someone", "sécret key")]))
    ) as server:
        yield server.base_url


KEY = "Bearer sécret key".encode().decode("latin-1")


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY[:-1],
        KEY + "x",
        KEY.upper(),
        KEY.replace("Bearer", "Basic"),
        KEY.replace("Bearer ", ""),
        KEY.replace("Bearer ", "Bearer  "),
        "Bearer \xff\xfe",
    ],
)
def test_only_the_exact_key_opens(locked_url: str, given: str | None) -> None:
    headers = {**ORIGIN, **({} if given is None else {"Authorization": given})}
    for method, path in (
        ("POST", COMPLETIONS),
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/v1/nothing"),
    ):
        reply = http.request(locked_url, method, path, BODY if method == "POST" else None, headers=headers)
        assert reply.status == 401
        assert reply.error["code"] == "invalid_api_key"
        assert reply.headers["access-control-allow-origin"] == "*"


def test_the_key_opens(locked_url: str) -> None:
    assert http.post(locked_url, COMPLETIONS, BODY, headers={"Authorization": KEY}).status == 200
    lower = {"Authorization": KEY.replace("Bearer", "bearer")}  # RFC 9110: the scheme's case does not matter
    assert http.post(locked_url, COMPLETIONS, BODY, headers=lower).status == 200
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert http.request(locked_url, "GET", path).status == 200


def test_a_browsers_preflight_needs_no_key(locked_url: str) -> None:
    asked = {
        **ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    reply = http.request(locked_url, "OPTIONS", CHAT, headers=asked)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization"


@pytest.mark.parametrize("origin", ["http://[x", "https://a.example/", "a.example", "null", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError):
        check_origin(origin)


def test_origins_can_be_chosen(tokenizer: Tokenizer) -> None:
    options = ServerOptions(allowed_origins=("https://example.org",))
    with RunningServer(CopyEngine(tokenizer), options) as server:
        allowed = http.request(server.base_url, "OPTIONS", CHAT, headers=ORIGIN)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = http.request(server.base_url, "OPTIONS", CHAT, headers={"Origin": "https://evil.example"})
        assert not any(name.startswith("access-control") for name in other.headers)
        streamed = http.post(server.base_url, COMPLETIONS, {**BODY, "stream": True}, headers=ORIGIN)
        assert streamed.headers["access-control-allow-origin"] == "https://example.org"


def test_a_connection_that_speaks_no_http_hurts_nobody(base_url: str) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    for data in (
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
    assert http.request(base_url, "GET", "/health").status == 200


def metric(base_url: str, name: str) -> float:
    """The sum over its labels."""
    lines = http.request(base_url, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_metrics_count_requests(tokenizer: Tokenizer) -> None:
    with RunningServer(CopyEngine(tokenizer)) as server:
        url = server.base_url
        http.post(url, COMPLETIONS, {**BODY, "n": 3})
        http.stream(url, COMPLETIONS, BODY)
        assert metric(url, "vllm:request_success_total") == 4
        assert metric(url, "vllm:e2e_request_latency_seconds_count") == 4
        assert metric(url, "vllm:time_to_first_token_seconds_count") == 4
        assert metric(url, "vllm:inter_token_latency_seconds_count") == 4 * 3


def test_two_servers_live_in_one_process(tokenizer: Tokenizer) -> None:
    with RunningServer(CopyEngine(tokenizer)) as one, RunningServer(CopyEngine(tokenizer)) as other:
        http.post(one.base_url, COMPLETIONS, BODY)
        assert metric(one.base_url, "vllm:request_success_total") == 1
        assert metric(other.base_url, "vllm:request_success_total") == 0


def test_an_error_that_nobody_foresaw_shows_no_details(
    base_url: str, core: CopyEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Any) -> None:
        raise RuntimeError("internal detail")

    monkeypatch.setattr(core, "validate", fail)
    reply = http.post(base_url, COMPLETIONS, BODY)
    assert reply.status == 500
    assert "detail" not in reply.error["message"]
    assert "internal detail" in caplog.text


@pytest.mark.parametrize("given", ["abc-123_X.:+=@", "a" * 128])
def test_a_request_id_comes_back(base_url: str, given: str) -> None:
    for method, path, body in (("POST", COMPLETIONS, BODY), ("GET", "/nothing", None), ("POST", CHAT, {})):
        reply = http.request(base_url, method, path, body, headers={"X-Request-Id": given})
        assert reply.headers["x-request-id"] == given
    reply = http.post(base_url, COMPLETIONS, {**BODY, "stream": True}, headers={"X-Request-Id": given})
    assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", [None, "", "a b", "a" * 129, "ü", "../../etc/passwd", "%0aERROR", '"', "\x1b[31m"]
)
def test_a_request_id_that_could_do_harm_is_replaced(base_url: str, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode().decode("latin-1")}
    ids = {
        http.request(base_url, "GET", "/health", headers=headers).headers.get("x-request-id") for _ in "ab"
    }
    assert given not in ids
    if ids != {None}:  # an escape in a header is refused before there is a request
        assert len(ids) == 2


def raw(base_url: str, data: bytes) -> tuple[int, bytes, bytes]:
    """What a connection answers to bytes: status, headers, body."""
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "invalid_http"),
        (b"hello\r\n\r\n", "invalid_http"),
        (b"GET / HTTP/9.9\r\n\r\n", "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", "invalid_http"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: \x00\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n", "headers_too_large"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", "headers_too_large"),
        (
            b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n",
            "headers_too_large",
        ),
    ],
)
def test_what_is_no_http_gets_an_error_of_the_same_shape(base_url: str, data: bytes, code: str) -> None:
    status, head, body = raw(base_url, data)
    assert status == 400
    assert b"application/json" in head
    reply = http.Reply(status, {}, body)
    assert reply.error["code"] == code
    assert http.request(base_url, "GET", "/health").status == 200


def test_a_cache_is_told_that_answers_depend_on_the_origin(tokenizer: Tokenizer) -> None:
    with RunningServer(
        CopyEngine(tokenizer), ServerOptions(allowed_origins=("https://a.example",))
    ) as server:
        assert http.request(server.base_url, "GET", "/health").headers["vary"] == "Origin"
