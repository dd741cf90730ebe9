"""A part of the server that stands outside of it, with routes and a life of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from jaxserve.server.openapi import Operation

if TYPE_CHECKING:
    from jaxserve.server.app import Server


class Extension(Protocol):
    """Attributes: operations: its routes, for `/openapi.json`."""

    operations: tuple[Operation, ...]

    def attach(self, app: web.Application, server: Server) -> None:
        """Add them. Called once, before anything is served."""

    async def start(self) -> None:
        """Requests are taken from now on."""

    async def stop(self) -> None:
        """The server drains: begin nothing, leave what can be gone on with later. Requests may still come."""

    def close(self) -> None:
        """No request comes any more."""
