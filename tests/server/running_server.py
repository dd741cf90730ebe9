"""An aiohttp server in a thread of this process, around an engine that the test holds."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from aiohttp import web

from jaxserve.server.app import Server, ServerOptions, build_app
from jaxserve.server.async_engine import AsyncEngine
from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.server.connection import JsonAppRunner
from jaxserve.server.conversion import ServingContext
from jaxserve.server.extension import Extension
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.tool_use import tool_format_of


class RunningServer:
    """Use it as a context manager. `server` is the application's own object, for tests that look inside."""

    def __init__(
        self,
        engine: Any,
        options: ServerOptions = ServerOptions(),
        limits: BreakerLimits = BreakerLimits(),
        extensions: Sequence[Extension] = (),
    ) -> None:
        self._extensions = extensions
        self._core = engine
        self._limits = limits
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if hasattr(self._core, "may_step"):
            self._core.may_step.set()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def drain(self, grace: float) -> None:
        """Begin a shutdown, as a signal would."""
        self.loop.call_soon_threadsafe(
            lambda: setattr(self, "_draining", self.loop.create_task(self.server.drain(grace)))
        )

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        breaker = CircuitBreaker(self._limits, time.monotonic)
        metrics = ServerMetrics(self._core.stats, breaker, self._core.model_name)
        self.engine = AsyncEngine(self._core, breaker, observer=metrics)
        context = ServingContext(
            tokenizer=self._core.tokenizer,
            generation=self._core.generation,
            model_names=(self._core.model_name,),
            max_model_len=self._core.max_request_tokens,
            validator=self._core,
            tool_format=tool_format_of(self._core.tokenizer),
        )
        self.server = Server(self.engine, context, metrics, self._options)
        self.app = build_app(self.server, self._extensions)
        runner = JsonAppRunner(self.app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        await web.SockSite(runner, sock).start()
        self.engine.start()
        for extension in self._extensions:
            await extension.start()
        self._ready.set()
        await self._stop.wait()
        for extension in self._extensions:
            await extension.stop()
        await runner.cleanup()
        await self.engine.stop()
        for extension in self._extensions:
            extension.close()
        self.server.close()
