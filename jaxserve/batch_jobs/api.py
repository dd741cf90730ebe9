"""The HTTP side of files and batches."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from jaxserve.batch_jobs.store import BatchStore, StoredBatch, StoredFile, is_full
from jaxserve.batch_jobs.worker import BatchWorker
from jaxserve.errors import InvalidRequestError
from jaxserve.server.app import KEY_NAME, Server, json_response, read_body
from jaxserve.server.conversion import BATCH_ENDPOINTS
from jaxserve.server.errors import ApiError, shutting_down
from jaxserve.server.openapi import Operation
from jaxserve.server.protocol import decode, refuse_unhonoured

MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_NAME_CHARS = 255
# A batch begins no further line while its lines have so many choices in the engine, running or waiting, or half of the
# places there.
MAX_IN_FLIGHT = 128
MAX_METADATA = 16
DEFAULT_PAGE, MAX_PAGE = 20, 100
_PAGE_QUERY: dict[str, dict[str, Any]] = {  # what a list takes
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "after": {"type": "string"},
}
_FILES_QUERY = {**_PAGE_QUERY, "purpose": {"type": "string"}, "order": {"enum": ["asc", "desc"]}}
_PIECE_BYTES = 64 * 1024
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/batches`.

    Attributes:
      endpoint: the url of all lines.
      completion_window: `24h`, the only one; nothing depends on it.
      metadata: at most 16 texts, given back.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


class BatchApi:
    """`/v1/files` and `/v1/batches`; a part of the server that `--data-dir` adds.

    Args:
      folder: where all is kept.

    Raises:
      ConfigError: the folder can't be had, or another process has it.
    """

    operations: tuple[Operation, ...] = (
        Operation("post", "/v1/files", "Upload a file.", uploads=True, errors=(400, 413, 507)),
        Operation(
            "get",
            "/v1/files",
            "The files, the newest first.",
            query=_FILES_QUERY,
            errors=(400,),
        ),
        Operation("get", "/v1/files/{id}", "One of them.", errors=(404,)),
        Operation("delete", "/v1/files/{id}", "Delete it.", errors=(400, 404, 507)),
        Operation(
            "get",
            "/v1/files/{id}/content",
            "What is in it.",
            content_type="application/octet-stream",
            errors=(404,),
        ),
        Operation("post", "/v1/batches", "Run the lines of a file.", BatchBody, errors=(400, 404, 413, 507)),
        Operation("get", "/v1/batches", "The batches, the newest first.", query=_PAGE_QUERY, errors=(400,)),
        Operation("get", "/v1/batches/{id}", "How far one is.", errors=(404,)),
        Operation("post", "/v1/batches/{id}/cancel", "Stop it.", errors=(404, 409, 507)),
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = BatchStore(folder)

    def attach(self, app: web.Application, server: Server) -> None:
        """Add the routes."""
        self._server = server
        self._worker = BatchWorker(
            self._store,
            self._folder / "running",
            server.engine,
            server.context,
            max_in_flight=max(1, min(MAX_IN_FLIGHT, server.options.max_open_requests // 2)),
        )
        app.router.add_post("/v1/files", self.upload)
        app.router.add_get("/v1/files", self.files)
        app.router.add_get("/v1/files/{id}", self.file)
        app.router.add_delete("/v1/files/{id}", self.delete_file)
        app.router.add_get("/v1/files/{id}/content", self.content)
        app.router.add_post("/v1/batches", self.create)
        app.router.add_get("/v1/batches", self.batches)
        app.router.add_get("/v1/batches/{id}", self.batch)
        app.router.add_post("/v1/batches/{id}/cancel", self.cancel)

    async def start(self) -> None:
        """Go on with what an earlier process left."""
        self._worker.start()

    async def stop(self) -> None:
        """Leave what runs for the next process."""
        await self._worker.stop()

    def close(self) -> None:
        """Let go of the folder."""
        self._store.close()

    def _check_open(self) -> None:
        if self._server.is_draining:
            raise shutting_down()

    # Files.

    async def upload(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/files`: the fields `purpose` and `file`, in either order."""
        self._check_open()
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequestError("the body must be multipart/form-data", code="invalid_body")
        purpose, filename = None, None
        with _room_wanted(), self._store.new_content() as (file_id, temporary):
            try:
                async for part in await request.multipart():
                    if isinstance(part, BodyPartReader) and part.name == "purpose" and purpose is None:
                        purpose = (await part.read_chunk(_PIECE_BYTES)).decode("utf-8", "replace")
                    elif isinstance(part, BodyPartReader) and part.name == "file" and filename is None:
                        filename = (part.filename or "file")[:MAX_NAME_CHARS]
                        await _receive(part, temporary)
                    else:
                        name = getattr(part, "name", None)
                        raise InvalidRequestError(
                            f"a file has the fields 'purpose' and 'file', once each, and not {name!r}",
                            param=name,
                            code="unknown_field",
                        )
            except InvalidRequestError:
                raise  # a ValueError as well
            except (ValueError, HttpProcessingError, web.RequestPayloadError):
                raise InvalidRequestError("the body is no multipart/form-data", code="invalid_body") from None
            if filename is None:
                raise InvalidRequestError("missing field 'file'", param="file", code="missing_field")
            if purpose != "batch":
                raise InvalidRequestError("purpose must be 'batch'", param="purpose")
            stored = await asyncio.to_thread(
                self._store.add_file,
                file_id,
                temporary,
                owner=_owner(request),
                filename=_plain(filename),
                purpose=purpose,
            )
        return json_response(_file_json(stored))

    async def files(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/files`."""
        stored = await asyncio.to_thread(self._store.files, _owner(request))
        purpose, order = request.query.get("purpose"), request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be 'asc' or 'desc'", param="order")
        stored = [one for one in stored if purpose in (None, one.purpose)]
        if order == "asc":
            stored.reverse()
        return _page(request, stored, _file_json, takes=_FILES_QUERY)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/files/{id}`."""
        return json_response(_file_json(await self._file(request.match_info["id"], request)))

    async def delete_file(self, request: web.Request) -> web.StreamResponse:
        """`DELETE /v1/files/{id}`."""
        stored = await self._file(request.match_info["id"], request)
        if await asyncio.to_thread(self._store.uses, stored.id):
            raise InvalidRequestError("an unfinished batch needs this file", code="file_in_use")
        with _room_wanted():
            await asyncio.to_thread(self._store.delete_file, stored)
        return json_response({"id": stored.id, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/files/{id}/content`."""
        stored = await self._file(request.match_info["id"], request)
        return web.FileResponse(
            self._store.path(stored.id), headers={"Content-Type": "application/octet-stream"}
        )

    async def _file(self, file_id: str, request: web.Request, *, param: str | None = None) -> StoredFile:
        stored = await asyncio.to_thread(self._store.file, _plain(file_id), _owner(request))
        if stored is None:
            raise ApiError(404, "there is no such file", param=param, code="file_not_found")
        return stored

    # Batches.

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/batches`."""
        self._check_open()
        body = decode(await read_body(request, self._server.max_body_bytes), BatchBody)
        if body.endpoint not in BATCH_ENDPOINTS:
            raise InvalidRequestError(
                f"endpoint must be one of {', '.join(BATCH_ENDPOINTS)}", param="endpoint"
            )
        if body.completion_window != "24h":
            raise InvalidRequestError("completion_window must be '24h'", param="completion_window")
        refuse_unhonoured(body, ("output_expires_after",), {})
        if len(body.metadata or {}) > MAX_METADATA:
            raise InvalidRequestError(f"metadata may have {MAX_METADATA} entries", param="metadata")
        source = await self._file(body.input_file_id, request, param="input_file_id")
        with _room_wanted():
            batch = await asyncio.to_thread(
                self._store.add_batch,
                owner=_owner(request),
                endpoint=body.endpoint,
                input_file_id=source.id,
                completion_window=body.completion_window,
                metadata=body.metadata,
            )
        self._worker.wake()
        return json_response(_batch_json(batch))

    async def batches(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/batches`."""
        stored = await asyncio.to_thread(self._store.batches, _owner(request))
        return _page(request, stored, _batch_json)

    async def batch(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/batches/{id}`."""
        return json_response(_batch_json(await self._batch(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/batches/{id}/cancel`."""
        batch = await self._batch(request)
        running = ("validating", "in_progress", "cancelling")
        with _room_wanted():
            if not await asyncio.to_thread(self._store.set_status, batch.id, "cancelling", only_from=running):
                raise ApiError(409, "the batch has ended, or is about to", code="batch_not_cancellable")
            await asyncio.to_thread(self._worker.cancel, batch.id)
        return json_response(_batch_json(await self._batch(request)))

    async def _batch(self, request: web.Request) -> StoredBatch:
        batch_id = _plain(request.match_info["id"])
        batch = await asyncio.to_thread(self._store.batch, batch_id, _owner(request))
        if batch is None:
            raise ApiError(404, "there is no such batch", code="batch_not_found")
        return batch


@contextmanager
def _room_wanted() -> Iterator[None]:
    """Something is about to be kept: says so where the disk is full."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not is_full(error):
            raise
        raise ApiError(507, "the server's disk is full", type="server_error", code="storage_full") from None


async def _receive(part: BodyPartReader, path: Path) -> None:
    size = 0
    with path.open("wb") as file:
        while piece := await part.read_chunk(_PIECE_BYTES):
            size += len(piece)
            if size > MAX_FILE_BYTES:
                raise ApiError(
                    413, f"a file may have {MAX_FILE_BYTES} bytes", param="file", code="body_too_large"
                )
            await asyncio.to_thread(file.write, piece)


def _owner(request: web.Request) -> str:
    return request.get(KEY_NAME, "")


def _plain(text: str) -> str:
    """Without lone surrogates, which the database could not compare."""
    return text.encode("utf-8", "replace").decode()


def _page[Stored: (StoredFile, StoredBatch)](
    request: web.Request,
    stored: Sequence[Stored],
    to_json: Callable[[Stored], dict[str, Any]],
    takes: Collection[str] = _PAGE_QUERY,
) -> web.Response:
    """The part of a list that `limit` and `after` ask for; the query has nothing but what the list `takes`."""
    for name in request.query:
        if name not in takes:
            raise InvalidRequestError(f"unknown field {name!r}", param=name, code="unknown_field")
    text = request.query.get("limit", str(DEFAULT_PAGE))
    limit = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequestError(f"limit must be between 1 and {MAX_PAGE}", param="limit")
    after = request.query.get("after")
    begin = 0
    if after is not None:
        ids = [one.id for one in stored]
        if after not in ids:
            raise InvalidRequestError("after must be an id of the list", param="after")
        begin = ids.index(after) + 1
    page = stored[begin : begin + limit]
    return json_response(
        {
            "object": "list",
            "data": [to_json(one) for one in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": begin + limit < len(stored),
        }
    )


def _file_json(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": stored.created_at,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
    }


def _batch_json(batch: StoredBatch) -> dict[str, Any]:
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    times = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        **{f"{name}_at": batch.times.get(name) for name in times},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }
