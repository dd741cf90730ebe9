"""Batch files: OpenAI batch lines in, one result line for each, through the server's own conversion and responses.

A line is ``{"custom_id": ..., "method": "POST", "url": "/v1/completions", "body": {...}}``, the url one of
`BATCH_ENDPOINTS`.
A result line holds `custom_id` and either `response` (as OpenAI has it: status_code, request_id, body) or `error`
(message, type, param, code, and the number of the line). Rules:

* Every line that is not blank gives one result line, in the order of the input, whatever is wrong with it.
* All of it is background work: interactive requests of the same engine pass it.
* A `custom_id` used twice is answered twice; the summary counts such lines.
* `stream` is refused: there is nobody to stream to.
* While it works, answers go to a journal beside the output (`OUTPUT.partial`). A restart keeps every answer in it
  whose line is still in the input, byte for byte, for the same model; lines that failed are tried again. The output
  itself appears at the end, whole, and the journal goes.

Memory stays flat: lines are read as the engine has room for them, and answers live in the journal.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import io
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.outputs import RequestOutput
from jaxserve.progress import NullProgress, Progress
from jaxserve.request import GenerationRequest
from jaxserve.server.answers import CountedAnswer, batch_answer
from jaxserve.server.conversion import BATCH_ENDPOINTS, PreparedRequest, ServingContext
from jaxserve.server.errors import ApiError, error_object, to_api_error
from jaxserve.server.preparation import prepare
from jaxserve.server.protocol import decode
from jaxserve.server.service_level import Caller

MAX_LINE_BYTES = 16 * 1024 * 1024
PHASE = "bytes of the input"
_BOM = b"\xef\xbb\xbf"


class BatchLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Engine(Protocol):
    """The part of `jaxserve.engine.EngineCore` that is used here; see there."""

    def submit(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[RequestOutput]: ...


@dataclass(slots=True)
class BatchSummary:
    """What a run did.

    Attributes:
      succeeded, failed: result lines of either kind in the output.
      resumed: those of the succeeded that an earlier run had made.
      duplicate_ids: lines whose custom_id had been used before in the file.
      prompt_tokens, completion_tokens, seconds: of this run alone.
    """

    succeeded: int = 0
    failed: int = 0
    resumed: int = 0
    duplicate_ids: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        """One line for people."""
        rate = self.completion_tokens / self.seconds if self.seconds else 0.0
        parts = [f"{self.succeeded} ok", f"{self.failed} failed"]
        if self.resumed:
            parts.append(f"{self.resumed} kept from an earlier run")
        if self.duplicate_ids:
            parts.append(f"{self.duplicate_ids} lines with a custom_id used before")
        parts.append(f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated")
        parts.append(f"{self.seconds:.1f} s, {rate:.1f} tokens/s")
        return "; ".join(parts)


def run_batch(
    engine: Engine,
    context: ServingContext,
    source: Path,
    destination: Path,
    *,
    max_in_flight: int,
    progress: Progress | None = None,
    caller: Caller = Caller(),
    summary: BatchSummary | None = None,
) -> BatchSummary:
    """Answer every line of `source` and write `destination` atomically.

    Args:
      max_in_flight: choices in the engine at once; enough to keep its batch full.
      progress: told (PHASE, bytes read of the input, its size).
      caller: who asks; whose share of the engine it takes.
      summary: is filled on the way, for whoever watches; a new one is made otherwise.

    Raises:
      OSError: a file can't be read or written. The journal stays, so a later run goes on from there.
    """
    service = dataclasses.replace(context.service, background_only=True)
    context = dataclasses.replace(context, service=service)
    runner = _BatchRunner(
        engine, context, max_in_flight, progress or NullProgress(), caller, summary or BatchSummary()
    )
    return runner.run(source, destination)


def write_unfinished(destination: Path) -> None:
    """Make `destination` of what an interrupted run has done, in the order in which it was; its journal goes.

    Of a line that was tried again after a restart the last record counts. The file appears whole or not at all.
    """
    journal_path = _journal_path(destination)
    offsets: dict[str, int] = {}  # of records, by the key of their line
    with journal_path.open("rb") as journal, _appearing_whole(destination) as file:
        journal.readline()  # the header
        at = journal.tell()
        while (data := journal.readline()).endswith(b"\n"):
            key = msgspec.json.decode(data, type=_Entry).key
            offsets.pop(key, None)  # the place goes as well
            offsets[key] = at
            at = journal.tell()
        for offset in offsets.values():
            file.write(_record_at(journal, offset) + b"\n")
    journal_path.unlink()


@contextmanager
def _appearing_whole(destination: Path) -> Iterator[BinaryIO]:
    temporary = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)


def _journal_path(destination: Path) -> Path:
    return destination.with_name(destination.name + ".partial")


@dataclass(slots=True)
class _Line:
    number: int  # from 1
    data: bytes  # empty where it is too long
    num_bytes: int
    key: bytes


@dataclass(slots=True)
class _Open:
    slot: int
    line: _Line
    custom_id: str
    prepared: PreparedRequest
    answer: CountedAnswer


@dataclass(slots=True)
class _BatchRunner:
    engine: Engine
    context: ServingContext
    max_in_flight: int
    progress: Progress
    caller: Caller
    summary: BatchSummary
    seen_ids: set[bytes] = field(default_factory=set)
    open: dict[str, _Open] = field(default_factory=dict)  # by id of a GenerationRequest
    choices_in_flight: int = 0

    def run(self, source: Path, destination: Path) -> BatchSummary:
        started = time.monotonic()
        size = source.stat().st_size
        journal_path = _journal_path(destination)
        with source.open("rb") as file, _Journal(journal_path, self.context.model_names[0]) as journal:
            for line in read_lines(file):
                slot = journal.new_slot()
                known = journal.find(line.key)
                if known is not None:
                    journal.fill(slot, known)
                    self.summary.succeeded += 1
                    self.summary.resumed += 1
                    self._note_id(journal.custom_id(known))
                else:
                    self._start(slot, line, journal)
                while self.choices_in_flight >= self.max_in_flight:
                    self._step(journal)
                self.progress(PHASE, min(file.tell(), size - 1), size)
            while self.open:
                self._step(journal)
            journal.write_output(destination)
        journal_path.unlink()
        self.progress(PHASE, max(size, 1), max(size, 1))
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _start(self, slot: int, line: _Line, journal: _Journal) -> None:
        custom_id: str | None = None
        try:
            if len(line.data) != line.num_bytes:
                raise InvalidRequestError(
                    f"the line has {line.num_bytes} bytes, at most {MAX_LINE_BYTES}", code="line_too_long"
                )
            custom_id = _custom_id(line.data)
            entry = decode(line.data, BatchLine, what="the line")
            self._note_id(entry.custom_id)
            prepared = _prepare(entry, self.context, self.caller)
        except (JaxserveError, ApiError) as error:
            self._fail(slot, line, custom_id, to_api_error(error), journal)
            return
        job = _Open(slot, line, entry.custom_id, prepared, batch_answer(prepared, self.context.tokenizer))
        for request in prepared.prompts:
            self.open[request.request_id] = job
        self.choices_in_flight += prepared.num_choices
        try:
            for request in prepared.prompts:
                self._submit(request, journal)
        except JaxserveError as error:
            self._close(job)
            self._fail(slot, line, custom_id, to_api_error(error), journal)

    def _submit(self, request: GenerationRequest, journal: _Journal) -> None:
        """While the queue is full, what is in the engine goes on, and is written down."""
        while request.request_id in self.open:  # otherwise its line has failed meanwhile
            try:
                self.engine.submit(request)
                return
            except QueueFullError:
                if not self.engine.has_work():
                    raise
            self._step(journal)

    def _step(self, journal: _Journal) -> None:
        for output in self.engine.step():
            job = self.open.get(output.request_id)
            if job is None:
                continue
            try:
                job.answer.add(output)
            except ApiError as error:
                self._close(job)
                self._fail(job.slot, job.line, job.custom_id, error, journal)
                continue
            if job.answer.is_complete:
                self._close(job)
                self._succeed(job, journal)

    def _close(self, job: _Open) -> None:
        for request in job.prepared.prompts:
            del self.open[request.request_id]
            self.engine.abort(request.request_id)  # does nothing to one that has ended
        self.choices_in_flight -= job.prepared.num_choices

    def _succeed(self, job: _Open, journal: _Journal) -> None:
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": job.custom_id,
            "response": {
                "status_code": 200,
                "request_id": job.prepared.response_id,
                "body": job.answer.to_json(),
            },
            "error": None,
        }
        journal.add(job.slot, job.line.key, record, keep=True)
        self.summary.succeeded += 1
        self.summary.prompt_tokens += job.answer.usage.prompt_tokens
        self.summary.completion_tokens += job.answer.usage.completion_tokens

    def _fail(
        self, slot: int, line: _Line, custom_id: str | None, error: ApiError, journal: _Journal
    ) -> None:
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": None,
            "error": {
                **msgspec.to_builtins(error_object(error)),
                "status_code": error.status,
                "line": line.number,
            },
        }
        journal.add(slot, line.key, record, keep=False)
        self.summary.failed += 1

    def _note_id(self, custom_id: str) -> None:
        digest = hashlib.sha256(custom_id.encode()).digest()[:16]
        if digest in self.seen_ids:
            self.summary.duplicate_ids += 1
        self.seen_ids.add(digest)


def _prepare(entry: BatchLine, context: ServingContext, caller: Caller) -> PreparedRequest:
    if not entry.custom_id:
        raise InvalidRequestError("custom_id must not be empty", param="custom_id")
    if entry.method != "POST":
        raise InvalidRequestError(f"method must be 'POST', got {entry.method!r}", param="method")
    for endpoint in BATCH_ENDPOINTS:
        if entry.url == endpoint:
            prepared = prepare(endpoint, bytes(entry.body), context, caller)
            break
    else:
        raise InvalidRequestError(
            f"url must be one of {', '.join(BATCH_ENDPOINTS)}, got {entry.url!r}",
            param="url",
            code="invalid_url",
        )
    if prepared.stream:
        raise InvalidRequestError("'stream' can't be true in a batch file", param="stream")
    return prepared


def _custom_id(data: bytes) -> str | None:
    """The line's custom_id for an error record, as far as it can be made out."""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def read_lines(file: BinaryIO) -> Iterator[_Line]:
    """The lines that are not blank, without line ends and a leading BOM; one that is too long comes without data.

    A line's key is the hash of its bytes and of how many equal lines came before it.
    """
    counts: Counter[bytes] = Counter()
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        digest = hashlib.sha256()
        num_bytes = len(data)
        if number == 1:
            data = data.removeprefix(_BOM)
        content = data.rstrip(b"\r\n")
        is_long = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
        digest.update(content)
        if is_long:
            while rest := file.readline(io.DEFAULT_BUFFER_SIZE):
                num_bytes += len(rest)
                digest.update(rest)
                if rest.endswith(b"\n"):
                    break
            content = b""
        elif not content.strip():
            continue
        else:
            num_bytes = len(content)
        plain = digest.digest()
        digest.update(counts[plain].to_bytes(8))
        counts[plain] += 1
        yield _Line(number=number, data=content, num_bytes=num_bytes, key=digest.digest())


class _Header(msgspec.Struct):
    jaxserve_batch: int
    model: str


class _Entry(msgspec.Struct):
    """One line of the journal. `keep`: use it again after a restart."""

    key: str
    keep: bool
    record: msgspec.Raw


def _record_at(journal: BinaryIO, offset: int) -> bytes:
    journal.seek(offset)
    return bytes(msgspec.json.decode(journal.readline(), type=_Entry).record)


class _CustomId(msgspec.Struct):
    custom_id: str = ""


class _Journal:
    """Result records in the order in which they were made, each beside the key of its line.

    Slots are the places in the output; `_offsets` says for each where its record stands in the file.
    """

    VERSION = 1

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._header = msgspec.json.encode(_Header(self.VERSION, model))
        self._known: dict[bytes, int] = {}
        self._offsets = array.array("q")

    def __enter__(self) -> _Journal:
        self._file = self._path.open("a+b")
        self._load()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def _load(self) -> None:
        """Find what an earlier run left, and drop a torn last line or the journal of another model."""
        self._file.seek(0)
        end = 0
        if self._file.readline().rstrip(b"\n") == self._header:
            end = self._file.tell()
            while (data := self._file.readline()).endswith(b"\n"):
                try:
                    entry = msgspec.json.decode(data, type=_Entry)
                except msgspec.DecodeError:
                    break
                if entry.keep:
                    self._known[bytes.fromhex(entry.key)] = end
                end = self._file.tell()
        self._file.truncate(end)
        if end == 0:
            self._file.write(self._header + b"\n")
            self._file.flush()

    def new_slot(self) -> int:
        """The next place in the output."""
        self._offsets.append(-1)
        return len(self._offsets) - 1

    def find(self, key: bytes) -> int | None:
        """Offset of an earlier run's record for a line."""
        return self._known.pop(key, None)

    def fill(self, slot: int, offset: int) -> None:
        """Use the record at `offset` for a place."""
        self._offsets[slot] = offset

    def custom_id(self, offset: int) -> str:
        """custom_id of the record at `offset`."""
        return msgspec.json.decode(_record_at(self._file, offset), type=_CustomId).custom_id

    def add(self, slot: int, key: bytes, record: dict[str, Any], *, keep: bool) -> None:
        """Append a record and use it for a place."""
        self._file.seek(0, os.SEEK_END)
        self._offsets[slot] = self._file.tell()
        entry = _Entry(key.hex(), keep, msgspec.Raw(msgspec.json.encode(record)))
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()

    def write_output(self, destination: Path) -> None:
        """All records in order; the file appears whole or not at all."""
        with _appearing_whole(destination) as file:
            for offset in self._offsets:
                file.write(_record_at(self._file, offset) + b"\n")
