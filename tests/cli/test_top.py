"""`jaxserve top` on a real server's metrics."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint import open_checkpoint
from jaxserve.cli.main import run
from jaxserve.cli.metrics_snapshot import Interval, Snapshot
from jaxserve.distribution import Distribution
from jaxserve.tokenizer import Tokenizer
from tests.cli.listening import listening
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

BODY = {"model": "copy", "prompt": "Hello world", "max_tokens": 4}
BOUNDS = (0.5, 1.0, 2.0, 8.0)


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint_dir: Path) -> Tokenizer:
    return open_checkpoint(demo_checkpoint_dir).load_tokenizer()


def rows(text: str) -> dict[str, list[str]]:
    """Cells by the first one of their line."""
    found = {}
    for line in text.splitlines():
        first, *cells = re.split(r"\s{2,}", line.strip())
        found[first] = cells
    return found


def milliseconds(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


def test_a_frame_of_a_server_at_work(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    core = CopyEngine(tokenizer, step_seconds=0.02)
    with RunningServer(core) as server:
        socks = [
            http.open_socket(server.base_url, "/v1/completions", {**BODY, "max_tokens": 2000, "stream": True})
            for _ in range(3)
        ]
        core.stats.num_running, core.stats.running_by_class["interactive"] = 3, 2
        core.stats.refusals["ttft_target"] = 5
        core.stats.num_free_blocks = 25
        assert run(["top", server.base_url, "--once", "--interval", "1"]) == 0
        for sock in socks:
            sock.close()
    shown = rows(capsys.readouterr().out)
    assert shown["all"][:2] == ["3", "0"]
    assert shown["interactive"][0] == "2"
    assert shown["KV cache in use"] == ["75.0%"]
    assert shown["refusals"] == ["5 (ttft_target 5)"]
    assert shown["circuit breaker"] == ["closed"]
    between = [milliseconds(cell) for cell in shown["between tokens"]]
    assert between == sorted(between)
    assert between[0] >= 10, "a step takes 20 ms"


@contextmanager
def answering(body: bytes, key: str | None = None) -> Iterator[str]:
    """An HTTP server that says always the same; the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(body if allowed else b"no")

        def log_message(self, *_: object) -> None: ...

    with listening(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


METRICS = b'vllm:num_requests_running{model_name="a\\u001b[31m\xc2\x9b[bold]b",engine="0"} 7\n'


def test_it_works_through_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(METRICS, "sesame") as url:
        assert run(["top", f"{url}/v1", "--once", "--interval", "0.1", "--api-key", "sesame"]) == 0
        shown = capsys.readouterr().out
        assert rows(shown)["all"][0] == "7"
        assert run(["top", url, "--once"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_what_a_server_says_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(METRICS.replace(b"\\u001b", b"\x1b")) as url:
        assert run(["top", url, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "\x9b" not in shown
    assert "[bold]" in shown


def test_frames_go_into_a_pipe_one_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(capsys.readouterr().out)
        if len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.cli.top.time.sleep", sleep)
    with answering(METRICS) as url:
        assert run(["top", url]) == 0
    assert [text.count("jaxserve top") for text in seen] == [0, 1, 1, 1]


@pytest.mark.parametrize("body", [b"", b"hello", b"\xff\xfe", b"some_metric 5\n", b"{}"])
def test_something_else_is_told_apart(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(body) as url:
        assert run(["top", url, "--once"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not the metrics of a jaxserve server" in line


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert run(["top", url]) == 2
    assert "no answer" in capsys.readouterr().err
    for bad in ("localhost:8000", "", "http://", "http://a:99999"):
        assert run(["top", bad]) == 2
        assert "http://" in capsys.readouterr().err


def snapshot(distribution: Distribution) -> Snapshot:
    return Snapshot(0.0, {"h_bucket": [({"le": le}, count) for le, count in distribution.cumulative()]})


@given(
    before=st.lists(st.floats(0, 20)),
    new=st.lists(st.floats(0, 20)),
    share=st.sampled_from((0.01, 0.5, 0.9, 0.99, 1.0)),
)
def test_percentiles_are_of_what_is_new(before: list[float], new: list[float], share: float) -> None:
    """The true one lies in the class that the answer comes from."""
    distribution = Distribution(BOUNDS)
    for value in before:
        distribution.observe(value)
    first = snapshot(distribution)
    for value in new:
        distribution.observe(value)
    found = Interval(first, snapshot(distribution)).percentile("h", share)
    if not new:
        assert found is None
        return
    assert found is not None
    rank = max(1, -(-share * len(new) // 1))
    true = sorted(new)[int(rank) - 1]
    low = max((bound for bound in (0.0, *BOUNDS) if bound < true), default=0.0)
    high = min((bound for bound in BOUNDS if bound >= true), default=BOUNDS[-1])
    assert low <= found <= high


def test_another_process_is_noticed() -> None:
    old = Snapshot(0.0, {"jaxserve:steps_total": [({}, 50.0)]})
    new = Snapshot(1.0, {"jaxserve:steps_total": [({}, 3.0)]})
    assert Interval(old, new).is_restart
    assert not Interval(new, old).is_restart
