from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve.server.app import Server
from jaxserve.server.run import RunOptions, bind, run_server, url
from jaxserve.server.tls import tls_context
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine

COMPLETIONS = "/v1/completions"
LONG = {"model": "copy", "prompt": "a b c", "max_tokens": 1000}

# A server process around the copying engine: the engine is not what is tested here.
PROGRAM = """
import sys, threading
from pathlib import Path
import tokenizers
from jaxserve.tokenizer import Tokenizer
from jaxserve.server.run import RunOptions, bind, run_server
from jaxserve.server.tls import tls_context
from tests.server.copy_engine import CopyEngine

backend = tokenizers.Tokenizer.from_file(str(next(Path(sys.argv[1]).rglob("tokenizer.json"))))
engine = CopyEngine(Tokenizer.from_parts(backend), step_seconds=0.005)
def die_on_request():
    sys.stdin.readline()
    engine.fail_with = RuntimeError("device lost")
threading.Thread(target=die_on_request, daemon=True).start()
tls = tls_context(*map(Path, sys.argv[3:])) if sys.argv[3:] else None
options = RunOptions(drain_seconds=float(sys.argv[2]), tls=tls)
sys.exit(run_server(engine, bind("127.0.0.1", 0), options, announce=lambda line: print(line, flush=True)))
"""


class Process:
    """The program above, listening."""

    def __init__(self, checkpoint: Path, grace: float, tls: tuple[Path, ...]) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(checkpoint), str(grace), *map(str, tls)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.base_url = self.popen.stdout.readline().removeprefix("listening on ").strip()
        assert self.base_url.startswith("https://" if tls else "http://")

    def kill_engine(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("die\n")
        self.popen.stdin.flush()


@pytest.fixture
def processes(demo_checkpoint_dir: Path) -> Iterator[ProcessFactory]:
    factory = ProcessFactory(demo_checkpoint_dir)
    yield factory
    for process in factory.started:
        process.popen.kill()
        process.popen.communicate()


class ProcessFactory:
    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.started: list[Process] = []

    def start(self, grace: float = 30.0, tls: tuple[Path, ...] = ()) -> Process:
        self.started.append(Process(self._checkpoint, grace, tls))
        return self.started[-1]


def wait_until_running(process: Process) -> None:
    while (
        b'vllm:time_to_first_token_seconds_count{engine="0",model_name="copy"} 0.0'
        in http.request(process.base_url, "GET", "/metrics").body
    ):
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_end_and_exits_with_0(
    processes: ProcessFactory, number: signal.Signals
) -> None:
    process = processes.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.timed_stream, process.base_url, COMPLETIONS, LONG)
        wait_until_running(process)
        process.popen.send_signal(number)
        signalled = time.monotonic()
        times, chunks = running.result(60)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"  # and [DONE]
    gaps = [later - earlier for earlier, later in pairwise([signalled, *(t for t in times if t > signalled)])]
    assert max(gaps) < sum(gaps) / 2, "what was left came at once, at the end"
    assert process.popen.wait(20) == 0


def test_the_grace_is_kept(processes: ProcessFactory) -> None:
    process = processes.start(grace=0.2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            http.post, process.base_url, COMPLETIONS, {**LONG, "stream": True, "max_tokens": 2000}
        )
        wait_until_running(process)
        process.popen.send_signal(signal.SIGTERM)
        assert b"shutting down" in running.result(60).body.split(b"\n\n")[-2]
    assert process.popen.wait(20) == 0


def test_nothing_new_is_taken_while_streams_end(processes: ProcessFactory) -> None:
    process = processes.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.stream, process.base_url, COMPLETIONS, LONG)
        wait_until_running(process)
        process.popen.send_signal(signal.SIGTERM)
        while http.request(process.base_url, "GET", "/ready").status == 200:
            time.sleep(0.01)
        for method, path in (("GET", "/ready"), ("POST", COMPLETIONS), ("POST", "/v1/chat/completions")):
            reply = http.request(process.base_url, method, path, LONG if method == "POST" else None)
            assert (reply.status, reply.error["code"]) == (503, "shutting_down")
            assert int(reply.headers["retry-after"]) >= 5
            assert reply.headers["connection"] == "close"
        assert not running.done(), "it was asked while the stream ran"
        assert running.result(60)[-1]["choices"][0]["finish_reason"] == "length"
    assert process.popen.wait(20) == 0


def test_a_whole_answer_that_is_cut_short_says_when_to_come_back(processes: ProcessFactory) -> None:
    process = processes.start(grace=0.2)
    with ThreadPoolExecutor(1) as pool:
        body = {**LONG, "max_tokens": 2000}
        stream = pool.submit(http.post, process.base_url, COMPLETIONS, {**body, "stream": True})
        wait_until_running(process)
        with ThreadPoolExecutor(1) as other:
            whole = other.submit(http.post, process.base_url, COMPLETIONS, body)
            time.sleep(0.3)  # nothing tells from outside that it runs
            process.popen.send_signal(signal.SIGTERM)
            reply = whole.result(60)
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert int(reply.headers["retry-after"]) >= 5
        assert b"[DONE]" not in stream.result(60).body
    assert process.popen.wait(20) == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key), signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run([*command, "-days", "2", *names, *files], check=True, capture_output=True)
    return certificate, key


def test_tls(processes: ProcessFactory, certificate: tuple[Path, Path]) -> None:
    process = processes.start(tls=certificate)
    trusting = ssl.create_default_context(cafile=certificate[0])
    with urllib.request.urlopen(f"{process.base_url}/health", context=trusting, timeout=20) as reply:
        assert json.load(reply)["status"] == "ok"
    client = openai.OpenAI(
        base_url=f"{process.base_url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(verify=trusting),
        max_retries=0,
    )
    pieces = client.completions.create(model="copy", prompt="a b c", max_tokens=5, stream=True)
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    address = urlsplit(process.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" not in sock.recv(4096), "no plain HTTP there"
    old = ssl.create_default_context(cafile=certificate[0])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with urllib.request.urlopen(f"{process.base_url}/health", context=old, timeout=20) as reply:
        assert reply.status == 200
    process.popen.send_signal(signal.SIGTERM)
    _, errors = process.popen.communicate(timeout=20)
    assert "Traceback" not in errors, errors


def test_certificates_that_cannot_serve_are_one_line(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for pair in ((certificate[0], None), (certificate[0], empty), (empty, None), (tmp_path / "none", None)):
        with pytest.raises(ConfigError) as caught:
            tls_context(*pair)
        assert "\n" not in str(caught.value)


class WaitsForTheDrain:
    """An extension that can't stop before requests are given their grace."""

    operations = ()

    def __init__(self) -> None:
        self.life: list[str] = []

    def attach(self, app: web.Application, server: Server) -> None:
        drain = server.drain

        async def noted(grace: float) -> None:
            self._drains.set()
            await drain(grace)

        server.drain = noted  # type: ignore[method-assign]

    async def start(self) -> None:
        self._drains = asyncio.Event()
        self.life.append("started")

    async def stop(self) -> None:
        await asyncio.wait_for(self._drains.wait(), 10)
        self.life.append("stopped")

    def close(self) -> None:
        self.life.append("closed")


def test_the_grace_does_not_wait_for_an_extension(tokenizer: Tokenizer) -> None:
    extension = WaitsForTheDrain()
    code = run_server(
        CopyEngine(tokenizer),  # type: ignore[arg-type]
        bind("127.0.0.1", 0),
        RunOptions(extensions=(extension,)),
        announce=lambda _: signal.raise_signal(signal.SIGTERM),
    )
    assert (code, extension.life) == (0, ["started", "stopped", "closed"])


def test_a_second_signal_ends_it_at_once(processes: ProcessFactory) -> None:
    process = processes.start(grace=1000)
    sock = http.open_socket(process.base_url, COMPLETIONS, {**LONG, "stream": True})
    wait_until_running(process)
    process.popen.send_signal(signal.SIGTERM)
    while http.request(process.base_url, "GET", "/health").status != 503:
        time.sleep(0.02)
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(20) == 128 + signal.SIGTERM
    sock.close()


def test_a_dead_engine_ends_the_process_with_1(processes: ProcessFactory) -> None:
    process = processes.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.post, process.base_url, COMPLETIONS, {**LONG, "stream": True})
        wait_until_running(process)
        process.kill_engine()
        assert b'"engine_dead"' in running.result(60).body.split(b"\n\n")[-2]
        assert http.request(process.base_url, "GET", "/health").status == 503
        assert http.request(process.base_url, "GET", "/v1/models").status == 200
        assert http.post(process.base_url, COMPLETIONS, LONG).error["code"] == "engine_dead"
    assert process.popen.wait(30) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01garbage\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
    ],
    ids=["length", "chunk", "header", "garbage", "gzip"],
)
def test_what_is_no_http_leaves_no_traceback(processes: ProcessFactory, raw: bytes) -> None:
    process = processes.start()
    address = urlsplit(process.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as sock:
        sock.sendall(raw)
        assert b" 400 " in sock.recv(65536).split(b"\r\n")[0]
    assert http.request(process.base_url, "GET", "/health").status == 200
    process.popen.send_signal(signal.SIGTERM)
    _, errors = process.popen.communicate(timeout=20)
    assert process.popen.returncode == 0
    assert "Traceback" not in errors, errors


def test_an_address_that_is_taken_or_wrong_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as caught:
            bind("127.0.0.1", port)
        assert "\n" not in str(caught.value)
    for host in ("203.0.113.7", "no such host", "x" * 300):
        with pytest.raises(ConfigError, match="can't listen"):
            bind(host, 0)


def test_a_client_whose_machine_is_gone_is_given_up_within_half_a_minute() -> None:
    """B101: no packet tells of it. (Streams are given up later: `stream.DEAD_PEER_SECONDS`.)"""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
    assert idle + interval * count <= 30


def test_addresses_are_written_as_urls() -> None:
    assert url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url("::1", 80) == "http://[::1]:80"
    assert url("::1", 80, tls=True) == "https://[::1]:80"
