"""A line for every request: what it says is true, and nothing that a client sends gets out of it."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.cli.log import BackgroundHandler, JsonFormatter, OneLineFormatter
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "copy", "prompt": "Hello world", "max_tokens": 4}
SECRET = "sesame-sesame"
KEYED = {"Authorization": f"Bearer {SECRET}"}
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Log:
    """Both forms of what is logged from now on."""

    def __init__(self) -> None:
        self.text, self.json = io.StringIO(), io.StringIO()
        self.handlers = [logging.StreamHandler(self.text), logging.StreamHandler(self.json)]
        self.handlers[0].setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
        self.handlers[1].setFormatter(JsonFormatter())

    def lines(self, count: int = 1) -> list[dict[str, Any]]:
        """The next `count` lines; there are no more of them. Takes them out."""
        end = time.monotonic() + 20
        while self.json.getvalue().count("\n") < count and time.monotonic() < end:
            time.sleep(0.01)
        found = [json.loads(line) for line in self.json.getvalue().splitlines()]
        assert len(found) == count, found
        assert self.text.getvalue().count("\n") == count
        self.clear()
        return found

    def clear(self) -> None:
        for stream in (self.text, self.json):
            stream.seek(0)
            stream.truncate()


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    logger = logging.getLogger("jaxserve.requests")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in made.handlers:
        logger.addHandler(handler)
    yield made
    for handler in made.handlers:
        logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def core(tokenizer: Tokenizer) -> CopyEngine:
    return CopyEngine(tokenizer)


@pytest.fixture(scope="module")
def base_url(core: CopyEngine) -> Iterator[str]:
    keys = make_api_keys([("someone", SECRET)])
    with RunningServer(core, ServerOptions(keys=keys)) as server:
        yield server.base_url


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_it_says_what_the_answer_says(base_url: str, log: Log, stream: bool, n: int) -> None:
    body = {**BODY, "n": n}
    headers = {**KEYED, "X-Request-Id": "mine-1"}
    if stream:
        options = {"include_usage": True}
        usage = http.stream(base_url, COMPLETIONS, {**body, "stream_options": options}, headers=headers)[-1][
            "usage"
        ]
    else:
        usage = http.post(base_url, COMPLETIONS, body, headers=headers).json["usage"]
    (line,) = log.lines()
    assert (line["level"], line["logger"]) == ("INFO", "jaxserve.requests")
    assert (line["request_id"], line["key"], line["status"]) == ("mine-1", "someone", 200)
    assert (line["method"], line["endpoint"], line["model"]) == ("POST", COMPLETIONS, "copy")
    assert (line["stream"], line["finish_reason"], line["error"]) == (stream, "length", None)
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"] == 4 * n
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]


def test_errors_carry_the_request_and_their_code(base_url: str, log: Log) -> None:
    for path, body, headers, status, error in (
        (COMPLETIONS, BODY, {}, 401, "invalid_api_key"),
        (COMPLETIONS, {**BODY, "model": "other"}, KEYED, 404, "model_not_found"),
        (CHAT, {"model": "copy", "messages": 5}, KEYED, 400, "invalid_type"),
        ("/nowhere", BODY, KEYED, 404, "invalid_request_error"),
    ):
        reply = http.post(base_url, path, body, headers=headers)
        (line,) = log.lines()
        assert (reply.status, line["status"], line["error"]) == (status, status, error)
        assert line["request_id"] == reply.headers["x-request-id"]
        assert line["endpoint"] == (path if status != 404 or path == COMPLETIONS else None)
        assert "prompt_tokens" not in line


def test_an_error_inside_a_stream_is_told(base_url: str, core: CopyEngine, log: Log) -> None:
    core.break_next = True
    http.post(base_url, COMPLETIONS, {**BODY, "stream": True}, headers=KEYED)
    (line,) = log.lines()
    assert (line["status"], line["finish_reason"]) == (200, "error")
    assert line["error"]


def test_a_client_that_goes_away(base_url: str, core: CopyEngine, log: Log) -> None:
    core.may_step.clear()
    known = len(core.submitted)
    parts = urlsplit(base_url)
    data = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    try:
        with socket.create_connection((parts.hostname, parts.port)) as sock:
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            while len(core.submitted) == known:
                time.sleep(0.01)
            http.reset(sock)
        (line,) = log.lines()
    finally:
        core.may_step.set()
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (499, "abort", 0)
    assert line["ttft_s"] is None


def test_questions_about_the_server_are_not_logged(base_url: str, log: Log) -> None:
    for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        assert http.request(base_url, "GET", path).status == 200
    http.request(base_url, "GET", "/v1/models", headers=KEYED)
    assert log.lines(1)[0]["endpoint"] == "/v1/models"


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):  # what is no HTTP may be hung up on before it has been read
        while piece := sock.recv(65536):
            data += piece
    return data


NASTY = st.text(
    st.one_of(st.sampled_from('\n\r\x1b\x00\u2028\ud800\x85" ={}%'), st.characters()), min_size=1, max_size=20
).map(lambda text: f"zqx {text}zqx")  # no harmless request id


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=NASTY)
def test_nothing_that_a_client_sends_gets_out(base_url: str, log: Log, text: str) -> None:
    sent = text.encode("utf-8", "surrogatepass")
    flat = re.sub(rb"[\r\n\x00]", b"?", sent)
    body = json.dumps({"model": text, "prompt": text, "user": text, text: text}).encode()
    good = json.dumps({**BODY, "prompt": [5, 6], "user": "zqx"}).encode()
    parts = urlsplit(base_url)
    count = 0
    for head in (
        b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: " + flat,
        b"POST /v1/models/" + re.sub(rb"[ \t]", b"?", flat) + b" HTTP/1.1",
        b"GET /v1/completions?" + re.sub(rb"[ \t]", b"?", flat) + b" HTTP/1.1\r\nUser-Agent: " + flat,
        b"ZQX /v1/completions HTTP/1.1\r\ntraceparent: " + flat,
    ):
        for data in (body, good):
            with socket.create_connection((parts.hostname, parts.port), timeout=20) as sock:
                rest = f"\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {SECRET}\r\n"
                rest += f"Content-Length: {len(data)}\r\n\r\n"
                sock.sendall(head + rest.encode() + data)
                answer = read_all(sock)
            count += b"x-request-id:" in answer.lower()  # otherwise it was no HTTP
    printed = log.text.getvalue() + log.json.getvalue()
    assert not UNSAFE.search(printed)
    assert "zqx" not in printed.lower()
    assert SECRET not in printed
    assert len(log.lines(count)) == count


@given(st.text(), st.dictionaries(st.text(), st.text()))
def test_json_lines_hold_whatever_they_are_given(text: str, fields: dict[str, str]) -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%s failed", (text,), None)
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.splitlines() == [line]
    assert json.loads(line)["message"] == f"{text} failed"
    record.fields = fields
    assert fields.items() <= json.loads(JsonFormatter().format(record)).items()


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("first\nsecond \x1b[31m")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "it failed", (), (type(error), error, None))
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    assert "ValueError: first\nsecond" in json.loads(line)["exception"]


class Unread(io.StringIO):
    """A log that nobody reads until `read` is set; `waiting` says that somebody waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.waiting = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.waiting.set()
        self.read.wait()
        return super().write(text)


def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    def say(text: str) -> None:
        handler.handle(logging.LogRecord("a", logging.INFO, "", 0, text, (), None))

    stream = Unread()
    handler = BackgroundHandler(stream, max_pending=10)
    say("line 0")
    assert stream.waiting.wait(20)
    for number in range(1, 1000):
        say(f"line {number}")
    stream.read.set()
    while "line 10\n" not in stream.getvalue():
        time.sleep(0.01)
    say("after")
    handler.close()
    assert stream.getvalue().splitlines() == [
        *(f"line {number}" for number in range(11)),
        "989 lines were left out: the log was not read fast enough",
        "after",
    ]
