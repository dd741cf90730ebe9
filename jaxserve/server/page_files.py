"""The page at `/`: files that come with the package, kept in memory. No request reaches the file system."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

from jaxserve.server.openapi import Operation

if TYPE_CHECKING:
    from jaxserve.server.app import Server

INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads and calls nothing but its own server, runs no script that is written into it, and is shown in no frame.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """Attributes: etag: of the body, without quotes."""

    body: bytes
    content_type: str
    etag: str


def read_page_files() -> dict[str, PageFile]:
    """All files of the page by their names."""
    files = {}
    for entry in resources.files("jaxserve.server").joinpath("page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in CONTENT_TYPES:
            body = entry.read_bytes()
            files[entry.name] = PageFile(body, CONTENT_TYPES[suffix], hashlib.sha256(body).hexdigest()[:32])
    return files


class Page:
    """A part of the server, open without a key: the page asks for it where one is needed."""

    operations: tuple[Operation, ...] = (
        Operation(
            "get", "/", "A page to chat and to watch the engine.", content_type="text/html", is_open=True
        ),
        Operation(
            "get",
            "/page/{name}",
            "What that page is made of.",
            content_type="*/*",
            errors=(404,),
            is_open=True,
        ),
    )

    def attach(self, app: web.Application, server: Server) -> None:
        """Add the routes."""
        self._files = read_page_files()
        app.router.add_get("/", self.index)
        app.router.add_get("/page/{name}", self.file)

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    def close(self) -> None:
        """Nothing to close."""

    async def index(self, request: web.Request) -> web.StreamResponse:
        """`GET /`."""
        return _respond(request, self._files[INDEX])

    async def file(self, request: web.Request) -> web.StreamResponse:
        """`GET /page/{name}`."""
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        return _respond(request, file)


def _respond(request: web.Request, file: PageFile) -> web.Response:
    known = request.if_none_match or ()
    is_known = any(etag.value == file.etag for etag in known)
    response = web.Response(status=304, headers=HEADERS) if is_known else web.Response(headers=HEADERS)
    if not is_known:
        response.body = file.body
        response.headers["Content-Type"] = file.content_type
    response.etag = file.etag
    return response
