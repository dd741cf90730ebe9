"""Runs batches, one after the other, in a thread of its own, as background work of the server's engine."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.batch_jobs.background_engine import BackgroundEngine, Interrupted
from jaxserve.batch_jobs.store import BatchStore, StoredBatch, is_full
from jaxserve.batch_runner import BatchSummary, read_lines, run_batch, write_unfinished
from jaxserve.server.async_engine import STOP_SECONDS, AsyncEngine
from jaxserve.server.conversion import ServingContext
from jaxserve.server.service_level import Caller

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # of one batch, as OpenAI has it
MAX_ERRORS = 20  # told of a batch that fails as a whole
RETRY_SECONDS = 1.0  # before a batch is tried again whose engine had ended
PAUSE_SECONDS = 10.0  # before another try where the disk was full
COUNT_SECONDS = 0.5  # between writing down how far a batch is


class _Url(msgspec.Struct):
    url: str | None = None


class _Record(msgspec.Struct):
    error: Any = None


def _passes(error: Exception) -> bool:
    """Whether a batch can go on where it was once the disk has room again, or nobody else holds the database."""
    return is_full(error) or isinstance(error, sqlite3.OperationalError)


@dataclass(slots=True)
class _Run:
    """A batch that runs, and the event that stops it."""

    batch_id: str
    interrupt: threading.Event = field(default_factory=threading.Event)


class BatchWorker:
    """Takes the oldest unfinished batch of the store, whosever it is, until it is stopped.

    Args:
      max_in_flight: choices in the engine at once.
      folder: for journals and unfinished outputs.
    """

    def __init__(
        self,
        store: BatchStore,
        folder: Path,
        engine: AsyncEngine,
        context: ServingContext,
        *,
        max_in_flight: int,
    ) -> None:
        folder.mkdir(exist_ok=True, mode=0o700)
        self._store = store
        self._folder = folder
        self._engine = engine
        self._context = context
        self._max_in_flight = max_in_flight
        self._wake = threading.Event()
        self._stopping = False
        self._current: _Run | None = None
        self._thread = threading.Thread(target=self._work, name="jaxserve-batches", daemon=True)

    def start(self) -> None:
        """Call it from the event loop that the engine's streams belong to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Stop a batch whose status has become `cancelling`. One that has not begun waits for no other to end."""
        current = self._current
        if current is not None and current.batch_id == batch_id:
            current.interrupt.set()
        elif (batch := self._store.batch(batch_id)) is not None and "in_progress" not in batch.times:
            self._store.set_status(batch_id, "cancelled", only_from=("cancelling",))
        self._wake.set()

    async def stop(self) -> None:
        """End the thread; what runs stays unfinished, for the next start. A step that hangs is not waited for."""
        self._stopping = True
        current = self._current
        if current is not None:
            current.interrupt.set()
        self._wake.set()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("batches did not stop within %g s; leaving them behind", STOP_SECONDS)

    def _work(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                self._work_on_next()
            except Exception as error:  # the thread outlives it, for all batches to come
                logger.log(
                    logging.WARNING if is_full(error) else logging.ERROR,
                    "batches can't go on for now: %s",
                    error,
                    exc_info=None if is_full(error) else error,
                )
                self._wake.wait(0 if self._stopping else PAUSE_SECONDS)

    def _work_on_next(self) -> None:
        batch = self._store.next_unfinished()
        if batch is None:
            self._wake.wait()
            return
        try:
            self._advance(batch)
        except Exception as error:
            if _passes(error):
                raise
            logger.exception("batch %s failed", batch.id)
            self._fail(batch, [{"code": "internal_error", "message": "internal server error"}])

    def _advance(self, batch: StoredBatch) -> None:
        self._current = _Run(batch.id)
        try:
            status = self._status(batch)  # again: from here on `cancel` sees that it runs
            if (
                self._stopping
                or status == "cancelled"
                or (status == "validating" and not self._validate(batch))
            ):
                return
            is_whole = status != "cancelling" and self._run(batch, self._current)
            if not is_whole and self._status(batch) != "cancelling":  # the engine or the server ends
                self._wake.wait(0 if self._stopping else RETRY_SECONDS)
                return
            self._finish(batch)
        finally:
            self._current = None

    def _status(self, batch: StoredBatch) -> str:
        stored = self._store.batch(batch.id)
        assert stored is not None, "batches are never deleted"
        return stored.status

    def _validate(self, batch: StoredBatch) -> bool:
        """Count the lines; False: the batch has failed. What is wrong with a single line is told in its result."""
        path, total = self._store.path(batch.input_file_id), 0
        errors: list[dict[str, Any]] = []
        with path.open("rb") as file:
            for line in read_lines(file):
                total += 1
                try:
                    url = msgspec.json.decode(line.data, type=_Url).url
                except (msgspec.DecodeError, RecursionError):
                    continue
                if url is not None and url != batch.endpoint and len(errors) < MAX_ERRORS:
                    message = f"the url is not that of the batch, {batch.endpoint}"
                    errors.append(
                        {"code": "invalid_url", "message": message, "line": line.number, "param": "url"}
                    )
        if not total:
            errors.append({"code": "empty_file", "message": "the input file has no lines"})
        if total > MAX_LINES:
            message = f"the input file has {total} lines, at most {MAX_LINES}"
            errors.append({"code": "too_many_lines", "message": message})
        if errors:
            self._fail(batch, errors)
            return False
        self._store.set_total(batch.id, total)
        self._store.set_status(batch.id, "in_progress", only_from=("validating",))
        return True

    def _run(self, batch: StoredBatch, run: _Run) -> bool:
        """Answer the lines that have no answer yet; False: interrupted."""
        destination = self._output(batch)
        if destination.exists():  # an earlier process got so far
            return True
        summary, noted = BatchSummary(), 0.0

        def note() -> None:
            nonlocal noted
            if time.monotonic() - noted > COUNT_SECONDS:
                noted = time.monotonic()
                self._count(batch, summary)

        engine = BackgroundEngine(self._engine, self._loop, run.interrupt, note)
        try:
            run_batch(
                engine,
                self._context,
                self._store.path(batch.input_file_id),
                destination,
                max_in_flight=self._max_in_flight,
                caller=Caller(identity=batch.owner),
                summary=summary,
            )
        except Interrupted:
            return False
        finally:
            engine.close()
            self._count(batch, summary)
        return True

    def _count(self, batch: StoredBatch, summary: BatchSummary) -> None:
        self._store.set_counts(batch.id, completed=summary.succeeded, failed=summary.failed)

    def _finish(self, batch: StoredBatch) -> None:
        """Make files of the results, those of the lines that failed apart. Does no harm a second time."""
        destination = self._output(batch)
        was_cancelled = not self._store.set_status(
            batch.id, "finalizing", only_from=("in_progress", "finalizing")
        )
        if not destination.exists():  # cancelled on its way, or before
            try:
                write_unfinished(destination)
            except FileNotFoundError:
                destination.touch()
        output = self._keep(batch, destination, "output", failed=False)
        errors = self._keep(batch, destination, "error", failed=True)
        self._store.set_results(batch.id, output_file_id=output, error_file_id=errors)
        self._store.set_status(batch.id, "cancelled" if was_cancelled else "completed")
        destination.unlink()

    def _keep(self, batch: StoredBatch, results: Path, what: str, *, failed: bool) -> str | None:
        # The same for every try, which replaces what an earlier one has left.
        file_id = f"file-{batch.id.removeprefix('batch_')}-{what}"
        with self._store.new_content(file_id) as (_, temporary):
            with results.open("rb") as source, temporary.open("wb") as file:
                for line in source:
                    if (msgspec.json.decode(line, type=_Record).error is not None) == failed:
                        file.write(line)
            if not temporary.stat().st_size:
                return None
            name = f"{batch.id}_{what}.jsonl"
            self._store.add_file(file_id, temporary, owner=batch.owner, filename=name, purpose="batch_output")
        return file_id

    def _fail(self, batch: StoredBatch, errors: list[dict[str, Any]]) -> None:
        self._store.set_errors(batch.id, errors)
        self._store.set_status(batch.id, "failed")

    def _output(self, batch: StoredBatch) -> Path:
        return self._folder / f"{batch.id}.jsonl"
