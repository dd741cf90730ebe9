"""`GET /debug/engine/stream`: true numbers, nothing of anybody's text, and a cost that only watchers cause."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from jaxserve.engine import EngineCore
from jaxserve.server import live_feed
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.live_feed import LiveFeed, LiveUpdate
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.hand_engine import hand_engine
from tests.server.running_server import RunningServer

PATH = "/debug/engine/stream"
SECRET = "xylophone-quarterdeck"


class Watcher:
    """A connection to the feed, read event by event."""

    def __init__(self, base_url: str, head: str = "", receive_buffer: int | None = None) -> None:
        parts = urlsplit(base_url)
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(20)
        self.sock.connect((parts.hostname, parts.port))
        self.sock.sendall(f"GET {PATH} HTTP/1.0\r\nHost: test\r\n{head}\r\n".encode())
        self.file = self.sock.makefile("rb")

    def head(self) -> bytes:
        return b"".join(iter(self.file.readline, b"\r\n"))

    def next(self) -> LiveUpdate | None:
        """None at the end of the stream."""
        while line := self.file.readline():
            if line.startswith(b"data: "):
                return msgspec.json.decode(line[6:], type=LiveUpdate, strict=True)
        return None

    def until(self, holds: Callable[[LiveUpdate], bool]) -> LiveUpdate:
        while (update := self.next()) is not None:
            if holds(update):
                return update
        raise AssertionError("the stream ended before")

    def close(self) -> None:
        self.file.close()
        self.sock.close()


@pytest.fixture
def core(tokenizer: Tokenizer) -> EngineCore:
    return hand_engine(tokenizer)


@pytest.fixture
def feed() -> LiveFeed:
    return LiveFeed()


@pytest.fixture
def server(core: EngineCore, feed: LiveFeed) -> Iterator[RunningServer]:
    with RunningServer(core, extensions=[feed]) as running:
        yield running


@pytest.fixture
def watch(server: RunningServer) -> Iterator[Callable[[], Watcher]]:
    watchers: list[Watcher] = []

    def begin() -> Watcher:
        watchers.append(Watcher(server.base_url))
        watchers[-1].head()
        return watchers[-1]

    yield begin
    for one in watchers:
        one.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def body(prompt: Any = "one two three four five six seven", **fields: Any) -> dict[str, Any]:
    return {"model": "hand", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, **fields}


def test_every_step_is_told_once_and_adds_up(
    server: RunningServer, core: EngineCore, watch: Callable[[], Watcher]
) -> None:
    watcher = watch()
    first = watcher.next()
    assert first is not None
    assert first.engine.steps == ()
    assert first.engine.running == first.engine.waiting == {"interactive": 0, "background": 0}
    http.stream(server.base_url, "/v1/completions", body(n=3))
    steps = []

    def is_over(update: LiveUpdate) -> bool:
        steps.extend(update.engine.steps)
        return len(steps) == core.stats.steps

    last = watcher.until(is_over)
    assert [step.step_id for step in steps] == list(range(core.stats.steps))
    for step in steps:
        assert step.decode + step.draft + sum(step.prefill) + step.padding == step.bucket_tokens
        assert (step.bucket_tokens, step.bucket_seqs) in core.stats.by_bucket
    useful = sum(step.bucket_tokens - step.padding for step in steps)
    assert useful == core.stats.useful_tokens
    assert (last.engine.generation_tokens, last.engine.num_steps) == (60, len(steps))
    idle = (
        last
        if not any(last.engine.running.values())
        else watcher.until(lambda update: not any(update.engine.running.values()))
    )
    assert idle.engine.pool.used == idle.engine.pool.shared == 0
    assert idle.engine.pool.cached > 0
    ttft, itl = idle.engine.ttft, idle.engine.itl
    assert (ttft.count, itl.count) == (3, 57)
    assert itl.p50 is not None
    assert 0 <= itl.p50 <= itl.p90 <= itl.p99


def test_pool_and_queue_are_seen_at_work(tokenizer: Tokenizer) -> None:
    core = hand_engine(tokenizer, step_seconds=0.02, max_num_seqs=2)
    with RunningServer(core, extensions=[LiveFeed()]) as server:
        watcher = Watcher(server.base_url)
        sock = http.open_socket(server.base_url, "/v1/completions", body(n=4, max_tokens=40, stream=True))
        busy = watcher.until(lambda update: update.engine.waiting["interactive"] == 2)
        assert busy.engine.running["interactive"] == 2
        assert busy.engine.pool.used + busy.engine.pool.shared > 0
        assert sum(busy.engine.pool.used_cells) == busy.engine.pool.used
        sock.close()
        watcher.until(lambda update: not any(update.engine.running.values()))
        watcher.close()


def test_nothing_of_what_anybody_says_is_in_it(
    server: RunningServer, core: EngineCore, watch: Callable[[], Watcher]
) -> None:
    """Every value is a number; the only texts are names of fields and classes, the same for all requests."""
    watcher = watch()
    request = body(SECRET, user=SECRET, stop=[SECRET], cache_salt=SECRET)
    answer = http.post(server.base_url, "/v1/completions", request, headers={"X-Request-Id": SECRET})
    update = watcher.until(lambda update: update.engine.generation_tokens == 20)
    text = msgspec.json.encode(update).decode()
    assert SECRET not in text
    assert answer.json["choices"][0]["text"] not in text
    assert answer.json["id"] not in text

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
            for inner in value.values():
                yield from texts(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from texts(inner)
        else:
            assert value is None or isinstance(value, int | float), value

    names = set(texts(json.loads(text)))
    idle = watch().next()
    assert names <= set(texts(json.loads(msgspec.json.encode(idle)))) | {
        field for step in update.engine.steps for field in step.__struct_fields__
    }


def test_nothing_is_made_while_nobody_watches(
    server: RunningServer, core: EngineCore, feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = []
    view = core.view
    monkeypatch.setattr(core, "view", lambda: views.append(time.monotonic()) or view())
    http.stream(server.base_url, "/v1/completions", body())
    assert views == []
    assert core._noted_steps is None
    watcher = Watcher(server.base_url)
    watcher.next()
    until(lambda: core._noted_steps is not None)
    watcher.close()
    until(lambda: feed.num_watchers == 0 and core._noted_steps is None)
    made = len(views)
    http.stream(server.base_url, "/v1/completions", body())
    time.sleep(3 * live_feed.MIN_INTERVAL_SECONDS)
    assert len(views) == made
    assert feed._event == b""
    assert feed._newest is None


def test_all_watch_the_same_views(
    server: RunningServer, core: EngineCore, watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many watch: views are made for one, no faster than ten a second."""
    views = []
    view = core.view
    monkeypatch.setattr(core, "view", lambda: views.append(time.monotonic()) or view())
    watchers = [watch() for _ in range(20)]
    seen = [watcher.next() for watcher in watchers]
    assert all(update is not None for update in seen)
    http.stream(server.base_url, "/v1/completions", body())
    ends = [watcher.until(lambda update: update.engine.generation_tokens == 20) for watcher in watchers]
    assert len({update.time for update in ends}) <= 2
    time.sleep(3 * live_feed.MIN_INTERVAL_SECONDS)
    gaps = [after - before for before, after in itertools.pairwise(views)]
    assert sum(gaps) >= 0.9 * live_feed.MIN_INTERVAL_SECONDS * len(gaps)


def test_a_dear_view_is_a_rare_one(
    server: RunningServer, core: EngineCore, watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that takes the engine's thread long is not asked for again before a hundred times as long has passed."""
    ends: list[float] = []
    starts: list[float] = []
    view = core.view

    def slow() -> Any:
        starts.append(time.monotonic())
        time.sleep(0.005)
        made = view()
        ends.append(time.monotonic())
        return made

    monkeypatch.setattr(core, "view", slow)
    watch()
    until(lambda: len(starts) >= 3)
    for end, start in zip(ends, starts[1:], strict=False):
        assert start - end >= 0.005 / live_feed.MAX_ENGINE_SHARE - 0.05


def test_a_watcher_who_does_not_read_holds_nothing_up(
    tokenizer: Tokenizer, feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "MIN_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(live_feed, "MAX_ENGINE_SHARE", 1.0)
    core = hand_engine(tokenizer, num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=32)
    with RunningServer(core, extensions=[feed]) as server:
        asleep = Watcher(server.base_url, receive_buffer=4096)
        awake = Watcher(server.base_url)
        awake.next()
        for _ in range(4):
            assert len(http.stream(server.base_url, "/v1/completions", body(n=4, max_tokens=200)))
        awake.until(lambda update: update.engine.generation_tokens == 3200)
        assert feed.num_watchers == 2
        asleep.close()
        until(lambda: feed.num_watchers == 1)
        awake.close()
        until(lambda: feed.num_watchers == 0)


def test_there_are_only_so_many(
    server: RunningServer, watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "MAX_WATCHERS", 2)
    first, second = watch(), watch()
    reply = http.request(server.base_url, "GET", PATH)
    assert (reply.status, reply.error["code"]) == (429, "too_many_watchers")
    assert int(reply.headers["retry-after"]) >= 1
    first.close()
    until(lambda: server.app is not None and b"200" in Watcher(server.base_url).head())
    assert second.next() is not None


def test_a_quiet_engine_is_quiet_and_gives_signs_of_life(
    watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "KEEP_ALIVE_SECONDS", 0.3)
    watcher = watch()
    lines = [watcher.file.readline() for _ in range(6)]
    assert lines[0].startswith(b"data: ")
    assert lines[1::2] == [b"\n"] * 3
    assert lines[2::2] == [live_feed.KEEP_ALIVE.split(b"\n")[0] + b"\n"] * 2


def test_a_key_is_wanted_where_there_are_any(core: EngineCore) -> None:
    keys = make_api_keys([("alice", "k1")])
    with RunningServer(core, ServerOptions(keys=keys), extensions=[LiveFeed()]) as server:
        reply = http.request(server.base_url, "GET", PATH)
        assert reply.status == 401
        watcher = Watcher(server.base_url, "Authorization: Bearer k1\r\n")
        assert b"200" in watcher.head()
        assert watcher.next() is not None
        watcher.close()


def test_the_end_of_the_server_ends_it(
    server: RunningServer, feed: LiveFeed, watch: Callable[[], Watcher]
) -> None:
    watcher = watch()
    watcher.next()
    server.loop.call_soon_threadsafe(lambda: server.loop.create_task(feed.stop()))
    assert watcher.next() is None
    assert http.request(server.base_url, "GET", PATH).error["code"] == "shutting_down"


def test_the_death_of_the_engine_ends_it(
    server: RunningServer, core: EngineCore, watch: Callable[[], Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = watch()
    watcher.next()
    monkeypatch.setattr(core, "view", lambda: 1 / 0)
    assert watcher.next() is None
    assert http.request(server.base_url, "GET", PATH).error["code"] == "engine_dead"


def test_the_document_names_it(server: RunningServer) -> None:
    document = http.request(server.base_url, "GET", "/openapi.json").json
    operation = document["paths"][PATH]["get"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert {"429", "503"} <= set(operation["responses"])
