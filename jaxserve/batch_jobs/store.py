"""What is known of files and batches: an SQLite database, with the files' contents beside it.

Every id is made here; nothing that a client sends becomes part of a path. Each row has an owner (the name of an API
key, "" without keys), who alone can see it.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  bytes INTEGER NOT NULL, created_at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
  completion_window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, created_at INTEGER NOT NULL,
  times TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT, errors TEXT, total INTEGER NOT NULL,
  completed INTEGER NOT NULL, failed INTEGER NOT NULL);
"""
_TABLES = ("files", "batches")
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. `created_at`: Unix time, seconds."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch.

    Attributes:
      times: Unix time, seconds, of each status it has reached.
      errors: why it failed as a whole.
      total, completed, failed: lines.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    status: str
    created_at: int
    times: dict[str, int]
    output_file_id: str | None
    error_file_id: str | None
    errors: list[dict[str, Any]] | None
    total: int
    completed: int
    failed: int


_JSON = ("metadata", "times", "errors")


def is_full(error: Exception) -> bool:
    """Whether an error says that the disk has no room left."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


class BatchStore:
    """Safe to use from several threads. One process at a time may have a folder open.

    Args:
      folder: is made if it is not there. What is put there only its owner can read; the rights of a folder that is
        there already stay as they are, since it may be one of others' (`/tmp`).

    Raises:
      ConfigError: it can't be had, or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._contents = folder / "files"
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._contents.mkdir(exist_ok=True, mode=0o700)
            database = folder / "batches.sqlite3"
            database.touch(mode=0o600)
            self._database = sqlite3.connect(
                database, check_same_thread=False, isolation_level=None, timeout=1.0
            )
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
            self._drop_numbers()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"can't keep files and batches in {folder}: {error}") from None
        for unfinished in self._contents.glob("file-*.tmp"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)

    def close(self) -> None:
        self._database.close()

    # Files.

    def path(self, file_id: str) -> Path:
        """Where the content of a file of this store lies."""
        return self._contents / file_id

    @contextmanager
    def new_content(self, file_id: str | None = None) -> Iterator[tuple[str, Path]]:
        """(id, path) for a content to be written; without `add_file` for that id nothing of it stays.

        Args:
          file_id: `file-...`, of a file that may be there already, and is replaced; None: a new one.
        """
        if file_id is None:
            file_id = f"file-{uuid.uuid4().hex}"
        temporary = self._contents / f"{file_id}.tmp"
        try:
            yield file_id, temporary
        finally:
            temporary.unlink(missing_ok=True)

    def add_file(
        self, file_id: str, temporary: Path, *, owner: str, filename: str, purpose: str
    ) -> StoredFile:
        """Keep a content that `new_content` gave the place for."""
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        os.replace(temporary, self.path(file_id))
        values = (file_id, owner, filename, purpose, size, int(time.time()))
        try:
            self._run("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)
        except sqlite3.Error:
            self.path(file_id).unlink(missing_ok=True)
            raise
        stored = self.file(file_id, owner)
        assert stored is not None
        return stored

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        rows = self._run("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        return StoredFile(**rows[0]) if rows else None

    def files(self, owner: str) -> list[StoredFile]:
        """The newest first."""
        rows = self._run("SELECT * FROM files WHERE owner = ? ORDER BY rowid DESC", (owner,))
        return [StoredFile(**row) for row in rows]

    def delete_file(self, stored: StoredFile) -> None:
        self._run("DELETE FROM files WHERE id = ?", (stored.id,))
        self.path(stored.id).unlink(missing_ok=True)

    # Batches.

    def add_batch(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: dict[str, str] | None,
    ) -> StoredBatch:
        batch_id, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        values = (batch_id, owner, endpoint, input_file_id, completion_window, json.dumps(metadata), now)
        self._run(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, 'validating', ?, '{}', NULL, NULL, NULL, 0, 0, 0)",
            values,
        )
        stored = self.batch(batch_id, owner)
        assert stored is not None
        return stored

    def batch(self, batch_id: str, owner: str | None = None) -> StoredBatch | None:
        """Args: owner: None sees all."""
        rows = self._run("SELECT * FROM batches WHERE id = ?", (batch_id,))
        return _batch(rows[0]) if rows and owner in (None, rows[0]["owner"]) else None

    def batches(self, owner: str) -> list[StoredBatch]:
        """The newest first."""
        rows = self._run("SELECT * FROM batches WHERE owner = ? ORDER BY rowid DESC", (owner,))
        return [_batch(row) for row in rows]

    def next_unfinished(self) -> StoredBatch | None:
        """The oldest, whosever it is."""
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._run(
            f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY rowid LIMIT 1", UNFINISHED
        )
        return _batch(rows[0]) if rows else None

    def uses(self, file_id: str) -> bool:
        """Whether an unfinished batch reads this file."""
        marks = ", ".join("?" * len(UNFINISHED))
        question = f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({marks})"
        return bool(self._run(question, (file_id, *UNFINISHED)))

    def set_status(self, batch_id: str, status: str, *, only_from: tuple[str, ...] = UNFINISHED) -> bool:
        """Note a status and its time; False where the batch is in none of `only_from`, and stays as it is."""
        with self._lock:
            row = self._database.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row["status"] not in only_from:
                return False
            times = json.loads(row["times"])
            times.setdefault(status, int(time.time()))
            self._database.execute(
                "UPDATE batches SET status = ?, times = ? WHERE id = ?", (status, json.dumps(times), batch_id)
            )
            return True

    def set_total(self, batch_id: str, total: int) -> None:
        self._run("UPDATE batches SET total = ? WHERE id = ?", (total, batch_id))

    def set_counts(self, batch_id: str, *, completed: int, failed: int) -> None:
        self._run("UPDATE batches SET completed = ?, failed = ? WHERE id = ?", (completed, failed, batch_id))

    def set_results(self, batch_id: str, *, output_file_id: str | None, error_file_id: str | None) -> None:
        self._run(
            "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE id = ?",
            (output_file_id, error_file_id, batch_id),
        )

    def set_errors(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        self._run("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), batch_id))

    def _drop_numbers(self) -> None:
        """Earlier versions numbered their rows; they stand in that order anyway."""
        for table in _TABLES:
            columns = self._database.execute(f"PRAGMA table_info({table})").fetchall()
            if any(column["name"] == "number" for column in columns):
                self._database.execute(f"ALTER TABLE {table} DROP COLUMN number")

    def _run(self, statement: str, values: tuple[Any, ...]) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()


def _batch(row: sqlite3.Row) -> StoredBatch:
    values = dict(row)
    return StoredBatch(**{k: json.loads(v) if k in _JSON and v is not None else v for k, v in values.items()})
