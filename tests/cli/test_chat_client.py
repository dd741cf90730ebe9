"""Faults of a server that the real one does not show on demand; its good answers are covered by test_chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer

import pytest

from jaxserve.cli.chat_client import ServerAnswerer
from jaxserve.cli.chat_session import ChatSettings
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError
from tests.cli.command import assert_refused, run_jaxserve
from tests.cli.listening import listening

MODELS = json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
SETTINGS = ChatSettings(max_tokens=4)
MESSAGES = [{"role": "user", "content": "hello"}]


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) + "\n\n"


@contextmanager
def server(models: tuple[int, str], answer: tuple[int, str] = (200, "")) -> Iterator[str]:
    """Says `models` to a GET and `answer` to a POST, then hangs up. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(*models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.say(*answer)

        def say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with listening(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@contextmanager
def raw_server(answers: list[bytes]) -> Iterator[str]:
    """Says them as they are to one request each, and hangs up. Yields its address."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(answers.pop(0))

    with listening(TCPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def answer_of(status: int, text: str) -> list[str]:
    with server((200, MODELS), (status, text)) as url:
        return list(ServerAnswerer.connect(url).stream(MESSAGES, SETTINGS))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_written_with_or_without_v1(suffix: str) -> None:
    with server((200, MODELS)) as url:
        answerer = ServerAnswerer.connect(url + suffix)
    assert (answerer.base_url, answerer.model) == (url, "first")


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ((200, "<html>"), "not the answer"),
        ((200, '{"data": [1]}'), "not the answer"),
        ((200, "[]"), "not the answer"),
        ((200, '{"data": []}'), "no model"),
        ((401, '{"error": {"message": "wrong key"}}'), "wrong key.*--api-key"),
        ((404, "nothing here"), "404"),
        ((503, '{"error": {"message": "starting"}}'), "starting"),
    ],
)
def test_what_is_not_a_usable_server_is_named_with_its_fault(models: tuple[int, str], named: str) -> None:
    with server(models) as url, pytest.raises(ConfigError, match=named) as caught:
        ServerAnswerer.connect(url)
    assert "http://127.0.0.1" in str(caught.value)


def test_a_model_that_the_server_does_not_have_is_refused_with_those_it_has() -> None:
    with server((200, MODELS)) as url, pytest.raises(ConfigError, match="first, second"):
        ServerAnswerer.connect(url, model="third")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://127.0.0.1:1",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "http://:8000",
        "http://user:password@127.0.0.1:1",
    ],
)
def test_an_address_where_nobody_answers_is_one_line(url: str) -> None:
    assert_refused(run_jaxserve("chat", "--url", url, stdin="hello\n"), url)


def test_the_pieces_come_as_they_were_sent_and_other_lines_are_ignored() -> None:
    usage = 'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
    role = 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    text = ": ping\n\n" + role + chunk("Hé") + "event: x\n" + chunk(" 👩‍🚀") + usage + "data: [DONE]\n\n"
    assert answer_of(200, text) == ["Hé", " 👩‍🚀"]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_conversation_is_told_from_a_broken_server(status: int) -> None:
    with pytest.raises(InvalidRequestError, match="too long"):
        answer_of(status, '{"error": {"message": "too long"}}')
    with pytest.raises(ConfigError, match="engine is dead"):
        answer_of(500, '{"error": {"message": "engine is dead"}}')


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("models", "answer", "named"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", b"", "does not speak HTTP"),
        (CHUNKED + b"40\r\n{", b"", "not the answer"),
        (None, b"", "no answer"),
        (None, CHUNKED + b"3\r\n: a\r\n", "hung up"),
        (None, CHUNKED + b"ff\r\n" + chunk("half").encode(), "broke off"),
    ],
)
def test_bytes_that_are_no_whole_http_answer_are_an_error_of_ours(
    models: bytes | None, answer: bytes, named: str
) -> None:
    """A server that is killed ends an answer in the middle of a chunk."""
    good = f"HTTP/1.1 200 OK\r\nContent-Length: {len(MODELS)}\r\n\r\n{MODELS}".encode()
    with (
        raw_server([good if models is None else models, answer]) as url,
        pytest.raises(JaxserveError, match=named),
    ):
        list(ServerAnswerer.connect(url).stream(MESSAGES, SETTINGS))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (chunk("half an"), "hung up"),
        ("", "hung up"),
        (chunk("half") + "data: {not json\n\n", "broke off"),
        (chunk("half") + 'data: {"error": {"message": "the engine failed"}}\n\n', "the engine failed"),
    ],
)
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(text: str, named: str) -> None:
    with pytest.raises(JaxserveError, match=named):
        answer_of(200, text)
