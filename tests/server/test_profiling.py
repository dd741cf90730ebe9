"""`/debug/profile`: bounded, one at a time, and nowhere but in its folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve.device.profiler import JaxProfiler
from jaxserve.errors import ConfigError
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.profiling import MAX_TRACES, ProfileApi
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

PROFILE = "/debug/profile"


@dataclass
class Tape:
    """A profiler that only notes what is asked of it."""

    running: bool = False
    folders: list[Path] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self, folder: Path) -> None:
        assert not self.running
        self.running = True
        self.folders.append(folder)
        folder.mkdir()

    def stop(self) -> None:
        assert self.running
        self.running = False
        self.stopped.set()


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def server(tokenizer: Tokenizer, tape: Tape, tmp_path: Path) -> Iterator[RunningServer]:
    api = ProfileApi(tmp_path / "traces", tape)
    core = CopyEngine(tokenizer, step_seconds=0.005)
    with RunningServer(core, extensions=[api]) as running:
        yield running


def profile(server: RunningServer, body: Any = None, **kwargs: Any) -> http.Reply:
    return http.post(server.base_url, PROFILE, body, **kwargs)


def test_jax_writes_a_trace(tokenizer: Tokenizer, tmp_path: Path) -> None:
    api = ProfileApi(tmp_path, JaxProfiler())
    with RunningServer(CopyEngine(tokenizer), extensions=[api]) as server:
        for _ in range(2):
            reply = profile(server, {"seconds": 0.2})
            assert reply.status == 200, reply.body
            assert reply.json["seconds"] >= 0.2
            assert list((tmp_path / reply.json["trace"]).rglob("*.xplane.pb"))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_trace_that_cannot_be_written_stands_in_nobodys_way(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its folder went away, or the disk is full: the next request has a trace again, and this one's as well."""
    folder = tmp_path / "traces"
    api = ProfileApi(folder, JaxProfiler())
    with RunningServer(CopyEngine(tokenizer), extensions=[api]) as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(profile, server, {"seconds": 1})
            while not api._running:
                time.sleep(0.005)
            folder.rmdir()
            folder.write_text("no folder")
            assert answer.result().status == 500
        assert answer.result().error["code"] == "profile_failed"
        assert "is not a directory" in answer.result().error["message"]
        reply = profile(server, {"seconds": 0.1})
        assert (reply.status, reply.error["code"]) == (500, "profile_failed")
        folder.unlink()
        assert profile(server, {"seconds": 0.1}).status == 200
    assert len(list(folder.iterdir())) == 2


def test_steps_are_counted(server: RunningServer, tape: Tape) -> None:
    core_stats = server.engine.stats
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(profile, server, {"steps": 3, "seconds": 30})
        while not tape.running:
            time.sleep(0.005)
        assert not tape.stopped.wait(0.1), "no step has come"
        while not answer.done():
            core_stats.steps += 1
            time.sleep(0.01)
        assert answer.result().json["steps"] >= 3
        assert answer.result().json["seconds"] < 30
    assert tape.stopped.is_set()


def test_one_at_a_time(server: RunningServer, tape: Tape) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: profile(server, {"seconds": 0.5}), range(8)))
    assert sorted(reply.status for reply in replies) == [200] + [409] * 7
    assert {reply.error["code"] for reply in replies if reply.status == 409} == {"profile_under_way"}
    assert len(tape.folders) == 1
    assert profile(server, {"seconds": 0.01}).status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        ({}, 200),
        ({"seconds": 0.01}, 200),
        ({"seconds": 0}, 400),
        ({"seconds": -1}, 400),
        ({"seconds": 61}, 400),
        ({"seconds": "1"}, 400),
        ({"steps": 0}, 400),
        ({"steps": 1001}, 400),
        ({"steps": 1.5}, 400),
        ({"folder": "/tmp/x"}, 400),
        ({"trace": "../../x"}, 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"seconds": NaN}', 400),
    ],
)
def test_bodies(server: RunningServer, tape: Tape, tmp_path: Path, body: Any, status: int) -> None:
    reply = profile(server, body)
    assert reply.status == status, reply.body
    assert not tape.running
    assert len(tape.folders) == (status == 200)
    assert all(folder.parent == tmp_path / "traces" for folder in tape.folders)


def test_a_client_that_leaves_leaves_no_trace_running(server: RunningServer, tape: Tape) -> None:
    sock = http.open_socket(server.base_url, PROFILE, {"seconds": 0.5})
    while not tape.running:
        time.sleep(0.005)
    http.reset(sock)
    assert tape.stopped.wait(20)


def test_a_shutdown_ends_it(tokenizer: Tokenizer, tape: Tape, tmp_path: Path) -> None:
    api = ProfileApi(tmp_path, tape)
    with RunningServer(CopyEngine(tokenizer), extensions=[api]) as server:
        sock = http.open_socket(server.base_url, PROFILE, {"seconds": 60})
        while not tape.running:
            time.sleep(0.005)
    sock.close()
    assert tape.stopped.is_set()


def test_the_folder_does_not_grow_for_ever(server: RunningServer, tape: Tape, tmp_path: Path) -> None:
    for number in range(MAX_TRACES):
        (tmp_path / "traces" / f"{number}").mkdir()
    assert profile(server, {"seconds": 0.01}).error["code"] == "profile_folder_full"
    assert not tape.folders


def test_it_needs_a_key_and_the_flag(tokenizer: Tokenizer, tape: Tape, tmp_path: Path) -> None:
    api = ProfileApi(tmp_path, tape)
    options = ServerOptions(keys=make_api_keys([("someone", "secret")]))
    with RunningServer(CopyEngine(tokenizer), options, extensions=[api]) as server:
        assert profile(server, {"seconds": 0.01}).status == 401
        assert profile(server, {"seconds": 0.01}, headers={"Authorization": "Bearer secret"}).status == 200
        paths = http.request(server.base_url, "GET", "/openapi.json").json["paths"]
        assert PROFILE in paths
    with RunningServer(CopyEngine(tokenizer)) as server:
        assert profile(server, {"seconds": 0.01}).status == 404


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--profile"):
        ProfileApi(tmp_path / "file" / "traces", JaxProfiler())
