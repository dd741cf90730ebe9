"""`/v1/files` and `/v1/batches`, with the openai client."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.batch_jobs import api, worker
from jaxserve.batch_jobs.api import BatchApi
from jaxserve.batch_jobs.store import BatchStore
from jaxserve.errors import ConfigError, OverloadedError
from jaxserve.request import GenerationRequest
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.errors import shutting_down
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

COMPLETIONS = "/v1/completions"
KEYS = ServerOptions(keys=make_api_keys([("ann", "a"), ("bob", "b")]))


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "copy", "prompt": f"one two three {number}", "max_tokens": 5, **fields}
    return {"custom_id": f"id-{number}", "method": "POST", "url": COMPLETIONS, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Running:
    """A server on a folder, and a client of one of its keys."""

    def __init__(self, core: CopyEngine, folder: Path, **options: Any) -> None:
        self.core = core
        self.batches = BatchApi(folder)
        self.server = RunningServer(core, replace(KEYS, **options), extensions=[self.batches])

    def __enter__(self) -> Running:
        self.server.__enter__()
        self.url = self.server.base_url
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="a", max_retries=0)
        self.other = self.client.with_options(api_key="b")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.__exit__(*exc_info)

    def begin(self, content: bytes) -> str:
        file = self.client.files.create(file=("in.jsonl", content), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata={"a": "b"}
        ).id

    def end(self, batch_id: str) -> Any:
        ends = ("completed", "failed", "cancelled")
        until(lambda: self.client.batches.retrieve(batch_id).status in ends)
        return self.client.batches.retrieve(batch_id)

    def records(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        return [json.loads(text) for text in self.client.files.content(file_id).text.splitlines()]


@pytest.fixture
def running(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Running]:
    with Running(CopyEngine(tokenizer), tmp_path / "data") as one:
        yield one


def test_a_batch_is_answered_line_by_line(running: Running) -> None:
    bad = [b"[1]\n", b"{\n", line(7, temperature=-1), line(8, stream=True)]
    batch = running.end(running.begin(jsonl(line(0), b"\n", line(1), *bad, line(0))))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        7,
        3,
        4,
    )
    assert (batch.metadata, batch.errors) == ({"a": "b"}, None)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good = running.records(batch.output_file_id)
    assert [record["custom_id"] for record in good] == ["id-0", "id-1", "id-0"]
    asked = http.post(running.url, COMPLETIONS, line(1)["body"], headers={"X-Api-Key": "a"}).json
    assert good[1]["response"]["body"]["choices"] == asked["choices"]
    failed = running.records(batch.error_file_id)
    assert [record["error"]["line"] for record in failed] == [4, 5, 6, 7]
    assert failed[2]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (jsonl({**line(0), "url": "/v1/chat/completions"}), "invalid_url"),
    ],
)
def test_a_file_that_makes_no_batch(running: Running, content: bytes, code: str) -> None:
    batch = running.end(running.begin(content))
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == [code]
    assert running.end(running.begin(jsonl(line(0)))).status == "completed", "the next one runs"


def test_a_restart_goes_on_where_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = jsonl(*[line(number, max_tokens=1 + 10 * number) for number in range(20)])
    with Running(CopyEngine(tokenizer), tmp_path) as one:
        expected = one.records(one.end(one.begin(content)).output_file_id)
    slow = CopyEngine(tokenizer, max_running=4, step_seconds=0.005)
    with Running(slow, tmp_path) as two:
        batch_id = two.begin(content)
        until(lambda: two.client.batches.retrieve(batch_id).request_counts.completed >= 3)
        waiting = two.begin(jsonl(line(1)))
    core = CopyEngine(tokenizer)
    with Running(core, tmp_path) as three:
        batch = three.end(batch_id)
        assert batch.status == "completed"
        assert len(core.submitted) < 20, "what had been done was not done again"
        assert batch.request_counts.completed == 20
        answers = [record["response"]["body"]["choices"] for record in three.records(batch.output_file_id)]
        assert answers == [record["response"]["body"]["choices"] for record in expected]
        assert three.end(waiting).status == "completed"


def test_a_cancelled_batch_keeps_what_was_done(tokenizer: Tokenizer, tmp_path: Path) -> None:
    core = CopyEngine(tokenizer, max_running=2, step_seconds=0.005)
    with Running(core, tmp_path) as running:
        batch_id = running.begin(jsonl(*[line(number, max_tokens=100) for number in range(50)]))
        until(lambda: running.client.batches.retrieve(batch_id).request_counts.completed >= 2)
        next_id, unwanted_id = running.begin(jsonl(line(0))), running.begin(jsonl(line(0)))
        unwanted = running.client.batches.cancel(unwanted_id)
        assert unwanted.status == "cancelled", "one that has not begun waits for no other to end"
        assert unwanted.cancelling_at <= unwanted.cancelled_at
        with pytest.raises(openai.NotFoundError):
            running.other.batches.cancel(batch_id)
        assert running.client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = running.end(batch_id)
        assert batch.status == "cancelled"
        assert 2 <= len(running.records(batch.output_file_id)) < 50
        assert running.end(next_id).status == "completed"
        until(lambda: not core.has_work())
        assert running.client.batches.retrieve(unwanted_id) == unwanted
        with pytest.raises(openai.ConflictError):
            running.client.batches.cancel(batch_id)


def test_batches_give_way(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A full queue makes them wait; a request beside them is served."""
    core = CopyEngine(tokenizer, max_running=2, max_waiting=2, step_seconds=0.001)
    with Running(core, tmp_path) as running:
        batch_id = running.begin(jsonl(*[line(number, n=2, max_tokens=20) for number in range(10)]))
        batch = running.end(batch_id)
        assert (batch.status, batch.request_counts.failed) == ("completed", 0)


def test_batches_leave_half_of_the_room_to_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    most = 0

    class Counting(CopyEngine):
        def submit(self, request: GenerationRequest) -> None:
            nonlocal most
            super().submit(request)
            most = max(most, len(self._running))

    core = Counting(tokenizer, max_running=2, max_waiting=4, step_seconds=0.01)
    with Running(core, tmp_path, max_open_requests=6) as running:
        batch_id = running.begin(jsonl(*[line(number, max_tokens=20) for number in range(12)]))
        assert running.end(batch_id).request_counts.completed == 12
    assert most == 3


def test_what_is_done_is_kept_while_the_queue_is_full(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Answers were not written down while the next line waited for a place."""
    core = CopyEngine(tokenizer, max_running=2, max_waiting=1, step_seconds=0.01)
    with Running(core, tmp_path) as running:
        content = jsonl(*[line(number, max_tokens=2000 if number > 1 else 1) for number in range(6)])
        batch_id = running.begin(content)
        until(lambda: running.client.batches.retrieve(batch_id).request_counts.completed == 2, 10)
        assert len(core.submitted) < 6, "lines still wait for a place"
    with Running(CopyEngine(tokenizer), tmp_path) as again:
        assert again.end(batch_id).request_counts.completed == 6
        assert len(again.core.submitted) == 4, "what had been done was not done again"


def test_a_target_that_nobody_can_keep_fails_its_line_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It was waited for, like room in the queue, without end, and every batch behind it as well."""

    class Late(CopyEngine):
        def check_admission(self, request: GenerationRequest, now: float) -> None:
            if request.targets.ttft_seconds is not None:
                raise OverloadedError("the first token would come too late", reason="ttft_target")
            super().check_admission(request, now)

    with Running(Late(tokenizer), tmp_path) as running:
        batch = running.end(running.begin(jsonl(line(0), line(1, slo_ttft_ms=1), line(2))))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "completed",
            2,
            1,
        )
        [record] = running.records(batch.error_file_id)
        assert (record["error"]["status_code"], record["error"]["code"]) == (429, "ttft_target")


def test_a_server_that_drains_still_tells_of_batches(running: Running, tmp_path: Path) -> None:
    batch_id = running.begin(jsonl(line(0)))
    running.end(batch_id)
    before = set((tmp_path / "data" / "files").iterdir())
    running.server.server.is_draining = True
    asyncio.run_coroutine_threadsafe(running.batches.stop(), running.server.loop).result()
    assert running.client.batches.retrieve(batch_id).status == "completed"
    file_id = running.client.files.list().data[0].id
    assert running.client.files.content(file_id).content
    for refused in (
        lambda: running.client.files.create(file=("a", b"x"), purpose="batch"),
        lambda: running.client.batches.create(
            input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.InternalServerError) as error:
            refused()
        assert (error.value.status_code, error.value.code) == (503, "shutting_down")
    assert set((tmp_path / "data" / "files").iterdir()) == before


def test_a_step_that_hangs_does_not_hold_up_the_end(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "STOP_SECONDS", 0.1)
    core = CopyEngine(tokenizer)
    with Running(core, tmp_path) as running:
        core.may_step.clear()
        batch_id = running.begin(jsonl(*[line(number) for number in range(20)]))
        until(lambda: bool(core.submitted))  # the next line waits for its admission
        asyncio.run_coroutine_threadsafe(running.batches.stop(), running.server.loop).result(20)
        assert "leaving them behind" in caplog.text
        running.server.loop.call_soon_threadsafe(running.server.engine.fail_all, shutting_down())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    with Running(CopyEngine(tokenizer), tmp_path) as again:
        assert again.end(batch_id).request_counts.completed == 20, "it is there for the next start"


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Exception]:
    """Two calls of a store's method fail; returns the failures that are still to come."""
    monkeypatch.setattr(worker, "PAUSE_SECONDS", 0.05)
    real, failures = (
        getattr(BatchStore, method),
        [OSError(errno.ENOSPC, "full"), sqlite3.OperationalError("full")],
    )

    def call(store: BatchStore, *args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(store, *args, **kwargs)

    monkeypatch.setattr(BatchStore, method, call)
    return failures


@pytest.mark.parametrize("method", ["set_total", "set_counts"])
def test_a_full_disk_is_waited_for(running: Running, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    failures = fill_the_disk(monkeypatch, method)
    batch = running.end(running.begin(jsonl(line(0), line(1))))
    assert (batch.status, batch.request_counts.completed, failures) == ("completed", 2, [])
    assert batch.request_counts.total == 2


def test_what_finds_no_room_is_told(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is nobody's bug: 507, and nothing of the attempt stays."""
    client = running.client
    file = client.files.create(file=("in.jsonl", jsonl(line(0))), purpose="batch")
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    real = BatchStore._run

    def run(store: BatchStore, statement: str, values: tuple[Any, ...]) -> Any:
        if not statement.startswith("SELECT"):
            raise full
        return real(store, statement, values)

    def add_file(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BatchStore, "_run", run)
        attempts: list[Callable[[], Any]] = [
            lambda: client.files.create(file=("a", b"x"), purpose="batch"),
            lambda: client.files.delete(file.id),
            lambda: client.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            ),
        ]
        for attempt in attempts:
            with pytest.raises(openai.APIStatusError) as told:
                attempt()
            assert (told.value.status_code, told.value.code) == (507, "storage_full")
    with monkeypatch.context() as patch:
        patch.setattr(BatchStore, "add_file", add_file)
        with pytest.raises(openai.APIStatusError) as told:
            attempts[0]()
        assert told.value.status_code == 507
    assert {path.name for path in (tmp_path / "data" / "files").iterdir()} == {file.id}
    assert "Traceback" not in caplog.text
    assert running.end(running.begin(jsonl(line(0)))).status == "completed"


def test_results_that_are_kept_again_take_the_place_of_the_first(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full, or a kill, at the end of a batch left a second pair of files."""
    failures = fill_the_disk(monkeypatch, "set_results")
    batch = running.end(running.begin(jsonl(line(0), line(1, temperature=-1))))
    assert (batch.status, failures) == ("completed", [])
    ids = [one.id for one in running.client.files.list()]
    assert ids == [batch.error_file_id, batch.output_file_id, batch.input_file_id]
    assert {path.name for path in (tmp_path / "data" / "files").iterdir()} == set(ids)
    assert [record["custom_id"] for record in running.records(batch.output_file_id)] == ["id-0"]
    assert [record["custom_id"] for record in running.records(batch.error_file_id)] == ["id-1"]


def test_a_folder_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    """Its rows had a number."""
    names = ("a", "b")
    store = BatchStore(tmp_path)
    for name in names:
        with store.new_content() as (file_id, temporary):
            temporary.touch()
            store.add_file(file_id, temporary, owner="", filename=name, purpose="batch")
    store.close()
    with sqlite3.connect(tmp_path / "batches.sqlite3") as database:
        for table in ("files", "batches"):
            database.execute(f"ALTER TABLE {table} ADD COLUMN number INTEGER NOT NULL DEFAULT 7")
    database.close()
    for _ in range(2):
        store = BatchStore(tmp_path)
        assert [one.filename for one in store.files("")] == ["b", "a"]
        assert store.next_unfinished() is None
        store.close()


def test_what_a_killed_upload_left_is_removed(tmp_path: Path) -> None:
    BatchStore(tmp_path).close()
    left = tmp_path / "files" / "file-0.tmp"
    left.write_bytes(b"x")
    BatchStore(tmp_path).close()
    assert not left.exists()


def test_what_belongs_to_one_is_not_there_for_another(running: Running) -> None:
    client, other = running.client, running.other
    file = client.files.create(file=("../../etc/passwd", jsonl(line(0))), purpose="batch")
    batch_id = running.begin(jsonl(line(0)))
    batch = running.end(batch_id)
    for question in (
        lambda who: who.files.retrieve(file.id),
        lambda who: who.files.content(batch.output_file_id),
        lambda who: who.batches.retrieve(batch_id),
        lambda who: who.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"),
        lambda who: who.files.delete(file.id),
    ):
        with pytest.raises(openai.NotFoundError):
            question(other)
    assert not list(other.files.list())
    assert not list(other.batches.list())
    assert {one.id for one in client.files.list()} == {file.id, batch.input_file_id, batch.output_file_id}
    assert [one.id for one in client.batches.list()] == [batch_id]
    assert client.files.retrieve(file.id).bytes == len(jsonl(line(0)))
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_names_of_clients_reach_no_path(running: Running, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    for name in ("../../evil", "/etc/passwd", '"a\tb', "é" * 500, ""):
        running.client.files.create(file=(name, b"{}\n"), purpose="batch")
    new = set(tmp_path.rglob("*")) - before
    assert all(path.parent == tmp_path / "data" / "files" and path.name.startswith("file-") for path in new)
    for path in (
        "/v1/files/..%2f..%2fbatches.sqlite3/content",
        "/v1/files/%2e%2e/content",
        "/v1/batches/%ed%a0%80",
    ):
        assert http.request(running.url, "GET", path, headers={"X-Api-Key": "a"}).status == 404


def test_bad_uploads_leave_nothing(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_FILE_BYTES", 1000)
    client = running.client
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("a", b"x" * 2000), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    key = {"X-Api-Key": "a"}
    for body, kind in (
        (b"{}", "application/json"),
        (b"nothing", "multipart/form-data"),
        (b"nothing", "multipart/form-data; boundary=x"),
        (
            b'--x\r\nContent-Disposition: form-data; name="other"\r\n\r\na\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
    ):
        reply = http.post(running.url, "/v1/files", body, headers={**key, "Content-Type": kind})
        assert (reply.status, bool(reply.error)) == (400, True), body
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\nbatch\r\n'
    for names, param in (
        (("purpose", "file", "expires_after[anchor]"), "expires_after[anchor]"),
        (("file", "file"), "file"),
    ):
        body = ("".join(map(part.format, names)) + "--x--\r\n").encode()
        headers = {**key, "Content-Type": "multipart/form-data; boundary=x"}
        reply = http.post(running.url, "/v1/files", body, headers=headers)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not list((tmp_path / "data" / "files").iterdir())


def test_only_the_owner_can_read_what_is_kept(tmp_path: Path) -> None:
    """A folder that was there keeps its rights: it may be /tmp."""
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir(mode=0o755)
    for folder in (there, new):
        BatchStore(folder).close()
        assert all(not path.stat().st_mode & 0o077 for path in folder.iterdir())
    assert there.stat().st_mode & 0o777 == 0o755
    assert not new.stat().st_mode & 0o077


def test_a_folder_has_one_server(running: Running, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        BatchStore(tmp_path / "data")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        BatchStore(tmp_path / "file")


def test_lists_have_pages(running: Running) -> None:
    ids = [running.client.files.create(file=("a", b"x"), purpose="batch").id for _ in range(5)]
    assert [one.id for one in running.client.files.list(limit=2)] == ids[::-1]
    assert [one.id for one in running.client.files.list(limit=2, order="asc")] == ids
    for query in ("limit=0", "limit=x", "after=x", "order=x", "before=x"):
        assert (
            http.request(running.url, "GET", f"/v1/files?{query}", headers={"X-Api-Key": "a"}).status == 400
        )


def test_the_document_names_its_routes(running: Running) -> None:
    document = http.request(running.url, "GET", "/openapi.json").json
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (route.method, route.resource.canonical)
        for route in running.server.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert described == served
    for path, more in (("/v1/files", {"purpose", "order"}), ("/v1/batches", set())):
        takes = {one["name"]: one for one in document["paths"][path]["get"]["parameters"]}
        assert set(takes) == {"limit", "after"} | more
        assert all(one["in"] == "query" for one in takes.values())
        at_most = takes["limit"]["schema"]["maximum"]
        for limit, status in ((at_most, 200), (at_most + 1, 400)):
            url = f"{path}?limit={limit}"
            assert http.request(running.url, "GET", url, headers={"X-Api-Key": "a"}).status == status
