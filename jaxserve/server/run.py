"""A server process's life: bind, serve, and the three ways to end (a signal, a second signal, a dead engine)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from jaxserve.errors import ConfigError
from jaxserve.request import Pooling, ServiceTargets
from jaxserve.server.app import Server, ServerOptions, build_app
from jaxserve.server.async_engine import AsyncEngine
from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.server.connection import MAX_HEADER_BYTES, MAX_HEADERS, JsonAppRunner
from jaxserve.server.conversion import ServingContext
from jaxserve.server.extension import Extension
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.service_level import ServiceRules
from jaxserve.server.tool_use import tool_format_of
from jaxserve.tool_calls.formats import AUTO

if TYPE_CHECKING:
    from jaxserve.engine import EngineCore

logger = logging.getLogger(__name__)

# After the engine's death: time for clients to read their error events and for a probe to see /health at 503.
DEATH_GRACE_SECONDS = 5.0
EXIT_ENGINE_DEAD = 1
# A peer that is silent is asked whether it is still there, after so many seconds; then so often, so many times.
# One that is only slow answers, even while it reads nothing. (The kernel's own first question comes after two hours.)
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Attributes:
    model_names: the names that requests may use; empty for the engine's own.
    drain_seconds: seconds that running requests get to end after SIGTERM or SIGINT.
    targets: of interactive requests that name none.
    pooling: how embeddings are made.
    breaker: when the server stops giving work to an engine that fails.
    tls: speak TLS, if given.
    tool_call_parser: the name of the form in which the model writes tool calls.
    extensions: further parts of the server.
    """

    server: ServerOptions = field(default_factory=ServerOptions)
    model_names: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    pooling: Pooling = "mean"
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    tls: ssl.SSLContext | None = None
    tool_call_parser: str = AUTO
    extensions: tuple[Extension, ...] = ()


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not yet listening; port 0 takes a free one.

    Called before a model is loaded, so that a port in use costs seconds, not minutes.

    Raises:
      ConfigError: the address can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _ask_silent_peers(sock)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def _ask_silent_peers(sock: socket.socket) -> None:
    """Have connections accepted from it end when the machine behind one is gone, which no packet tells of."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def run_server(
    engine: EngineCore,
    sock: socket.socket,
    options: RunOptions,
    *,
    announce: Callable[[str], None] = print,
) -> int:
    """Serve `engine` on `sock` until a signal or the engine's death, and return the process's exit code.

    SIGTERM or SIGINT: nothing new is taken (503), running requests get `drain_seconds` seconds, then an error event;
    the code is 0. A second signal ends the process at once. Engine dead: `/health` is 503 at once, open requests
    end with an error, and `DEATH_GRACE_SECONDS` later the code is 1.

    Args:
      announce: told `listening on URL` once requests are taken.

    Raises:
      ConfigError: another process took the port in the meantime.
    """
    return asyncio.run(_serve(engine, sock, options, announce))


async def _serve(
    core: EngineCore, sock: socket.socket, options: RunOptions, announce: Callable[[str], None]
) -> int:
    model_names = options.model_names or (core.model_name,)
    breaker = CircuitBreaker(options.breaker, time.monotonic)
    metrics = ServerMetrics(core.stats, breaker, model_names[0])
    dead = asyncio.Event()
    engine = AsyncEngine(core, breaker, observer=metrics, on_death=lambda _: dead.set())
    context = ServingContext(
        tokenizer=core.tokenizer,
        generation=core.generation,
        model_names=model_names,
        max_model_len=core.max_request_tokens,
        validator=core,
        service=ServiceRules(interactive=options.targets, client_secret=secrets.token_bytes(32)),
        tool_format=tool_format_of(core.tokenizer, options.tool_call_parser),
        pooling=options.pooling,
        embedding_size=core.model_config.hidden_size,
    )
    server = Server(engine, context, metrics, options.server)
    runner = JsonAppRunner(
        build_app(server, options.extensions),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        logger=_http_logger(),
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
    )
    stop = _stop_on_signals()
    await runner.setup()
    host, port = sock.getsockname()[:2]
    try:
        await web.SockSite(runner, sock, backlog=1024, ssl_context=options.tls).start()
    except OSError as error:
        await runner.cleanup()
        raise _cannot_listen(host, port, error) from None
    engine.start()
    for extension in options.extensions:
        await extension.start()
    announce(f"listening on {url(host, port, tls=options.tls is not None)}")
    await _first_of(stop, dead)
    server.is_draining = not dead.is_set()  # before anything that takes time
    async with (
        asyncio.TaskGroup() as group
    ):  # the grace begins at once, whatever an extension still waits for
        for extension in options.extensions:
            group.create_task(extension.stop())
        code = await _until_the_end(server, dead, options.drain_seconds)
    await runner.cleanup()
    await engine.stop()  # ends what an extension may still wait for
    for extension in options.extensions:
        extension.close()
    server.close()
    return code


async def _until_the_end(server: Server, dead: asyncio.Event, grace: float) -> int:
    if not dead.is_set():
        logger.info("shutting down: waiting up to %g s for running requests", grace)
        draining = asyncio.create_task(server.drain(grace))
        died = asyncio.create_task(dead.wait())
        await asyncio.wait((draining, died), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, died):
            task.cancel()
    if not dead.is_set():
        return 0
    logger.critical("exiting because the engine is dead")
    await asyncio.sleep(DEATH_GRACE_SECONDS)
    return EXIT_ENGINE_DEAD


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # asked twice: at once
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def url(host: str, port: int, *, tls: bool = False) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"can't listen on {host} port {port}: {reason}")


def _http_logger() -> logging.Logger:
    """aiohttp's log without a traceback for every client that sends something that is not HTTP."""
    http_logger = logging.getLogger("jaxserve.server.http")
    http_logger.addFilter(_is_our_fault)
    return http_logger


def _is_our_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)
