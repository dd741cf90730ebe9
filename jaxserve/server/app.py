"""The HTTP application: routes, middlewares, and the handlers that tie conversion, engine and responses together."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from jaxserve.errors import EngineDeadError, JaxserveError, QueueFullError
from jaxserve.server import metrics
from jaxserve.server.answers import Answer, endpoint_error_body, streamed_answer, whole_answer
from jaxserve.server.anthropic.body import count_tokens
from jaxserve.server.api_keys import ApiKeys, sent_key
from jaxserve.server.async_engine import AsyncEngine
from jaxserve.server.circuit_breaker import BreakerOpenError
from jaxserve.server.conversion import Endpoint, PreparedRequest, ServingContext
from jaxserve.server.cors import ANY_ORIGIN, cors_headers
from jaxserve.server.errors import ApiError, shutting_down, to_api_error
from jaxserve.server.extension import Extension
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.openapi import OPERATIONS, Operation, openapi_document
from jaxserve.server.preparation import prepare
from jaxserve.server.request_id import REQUEST_ID, add_request_id
from jaxserve.server.request_log import log_request
from jaxserve.server.request_record import RECORD, Reporter, new_record
from jaxserve.server.retry_after import retry_after
from jaxserve.server.service_level import Caller, place_at_a_glance, read_caller
from jaxserve.server.stream import send_stream
from jaxserve.server.tokenization import detokenize, tokenize
from jaxserve.server.worker_threads import FIRST, WorkerThreads

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MIN_BODY_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_BYTES_PER_CHAR = 12  # a character past the basic plane, written as two \uXXXX escapes
CLIENT_CLOSED_REQUEST = 499  # as nginx calls it; nobody is there to read it
KEY_NAME = web.RequestKey("key_name", str)  # of the API key that a request came with


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server behaves towards its clients.

    Attributes:
      keys: one of them is required on everything but what operations say is open, if there are any.
      allowed_origins: origins that browsers may call from; "*" is any.
      max_open_requests: HTTP requests in progress beyond which new ones get 429.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = (ANY_ORIGIN,)
    max_open_requests: int = 8192


class Server:
    """The handlers and what they share. `build_app` makes the aiohttp application around it."""

    def __init__(
        self,
        engine: AsyncEngine,
        context: ServingContext,
        server_metrics: ServerMetrics,
        options: ServerOptions,
        *,
        jitter: random.Random | None = None,
    ) -> None:
        self.engine = engine
        self.context = context
        self.options = options
        self.metrics = server_metrics
        longest = MAX_BYTES_PER_CHAR * context.tokenizer.max_chars_for(context.max_model_len)
        self.max_body_bytes = min(max(MIN_BODY_BYTES, longest), MAX_BODY_BYTES)
        self.operations: tuple[Operation, ...] = OPERATIONS
        self.reporters: list[Reporter] = [log_request]
        self.is_draining = False
        self._jitter = jitter or random.Random()
        self._created = int(time.time())
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = WorkerThreads()

    # Life.

    async def drain(self, grace_seconds: float) -> None:
        """Take nothing new, let what runs come to its end within the grace, then end the rest with an error."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except TimeoutError:
            logger.warning("%d requests did not end within the grace", self._open)
            self.engine.fail_all(shutting_down())
            try:
                await asyncio.wait_for(self._idle.wait(), 2.0)  # time to write the error event
            except TimeoutError:
                logger.warning("%d clients do not read their answers", self._open)

    def close(self) -> None:
        """End the worker threads."""
        self._threads.close()

    # Generation.

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._generate(request, "/v1/completions")

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, "/v1/chat/completions")

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`."""
        return await self._generate(request, "/v1/messages")

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/embeddings`."""
        return await self._generate(request, "/v1/embeddings")

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`."""
        return await self._generate(request, "/v1/responses")

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        record = request[RECORD]
        record.is_generation = True
        with self._refusals_counted():
            self._check_open()
        self._open += 1
        self._idle.clear()
        try:
            key_name = request.get(KEY_NAME, "")
            caller = read_caller(request.headers, key_name)
            data = await read_body(request, self.max_body_bytes)
            prepare = functools.partial(self._prepare, endpoint, data, caller)
            prepared = await self._threads.run(place_at_a_glance(data, caller), prepare)
            del data, prepare
            record.begin(prepared)
            with self._refusals_counted():
                opened = self.engine.open(prepared.prompts, record.add)
            with opened as outputs:
                try:
                    await outputs.admitted()
                    if prepared.stream:
                        source = streamed_answer(prepared, self.context.tokenizer)
                        return await send_stream(request, source, outputs)
                    answer = whole_answer(prepared, self.context.tokenizer)
                    while news := await outputs.next():
                        for output in news:
                            answer.add(output)
                finally:
                    if key_name:
                        self.metrics.keys.count(key_name, outputs)
            return await self._json_response(prepared, answer)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _prepare(self, endpoint: Endpoint, data: bytes, caller: Caller) -> PreparedRequest:
        prepared = prepare(endpoint, data, self.context, caller)
        promised = self.engine.check_admission(prepared.prompts)
        return dataclasses.replace(prepared, prompts=promised)

    async def _json_response(self, prepared: PreparedRequest, answer: Answer) -> web.Response:
        if prepared.num_logprobs is None and prepared.embeds_as is None:
            return json_response(answer.to_json())
        # May be megabytes.
        body = await self._threads.run(FIRST, lambda: msgspec.json.encode(answer.to_json()))
        return web.Response(body=body, content_type="application/json")

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        """Those at the door; the engine counts its own."""
        try:
            yield
        except (ApiError, JaxserveError, BreakerOpenError) as error:
            self.metrics.refused(to_api_error(error).code or "other")
            raise

    def _check_open(self) -> None:
        if self.is_draining:
            raise shutting_down()
        if not self.engine.is_alive:
            raise EngineDeadError("the engine has stopped")
        self.engine.breaker.check()
        if self._open >= self.options.max_open_requests:
            raise QueueFullError(
                f"{self._open} requests are in progress, at most {self.options.max_open_requests}"
            )

    # Text and tokens.

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """`POST /tokenize`."""
        return await self._answer(request, tokenize)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """`POST /detokenize`."""
        return await self._answer(request, detokenize)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/messages/count_tokens`."""
        return await self._answer(request, count_tokens)

    async def _answer(
        self, request: web.Request, answer: Callable[[bytes, ServingContext], msgspec.Struct]
    ) -> web.StreamResponse:
        """By what needs no engine, in a worker thread."""
        data = await read_body(request, self.max_body_bytes)
        make = lambda: msgspec.json.encode(answer(data, self.context))  # noqa: E731
        body = await self._threads.run(FIRST, make)
        return web.Response(body=body, content_type="application/json")

    # Errors.

    def error_response(self, request: web.Request, error: ApiError) -> web.Response:
        """An error in the shape of the endpoint."""
        request[RECORD].error = error.code or error.type
        headers = dict(error.headers)
        if error.retry_after_seconds is not None:
            headers["Retry-After"] = retry_after(error.retry_after_seconds, self._jitter)
        response = web.Response(
            body=endpoint_error_body(request.path, error),
            status=error.status,
            content_type="application/json",
            headers=headers,
        )
        if self.is_draining:
            response.force_close()  # the next request on this connection belongs elsewhere
        return response

    # About the server.

    async def models(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`."""
        names = self.context.model_names
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models/{name}`."""
        name = request.match_info["name"]
        self.context.check_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "root": self.context.model_names[0],
            "max_model_len": self.context.max_model_len,
        }

    async def health(self, request: web.Request) -> web.StreamResponse:
        """`GET /health`, liveness: 503 once the engine is dead, or the server shuts down: it will not come back."""
        if not self.engine.is_alive:
            return json_response({"status": "dead"}, status=503)
        if self.is_draining:
            return json_response({"status": "shutting down"}, status=503)
        return json_response({"status": "ok", "circuit_breaker": self.engine.breaker.state.value})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """`GET /ready`, readiness: 200 while a request that comes now would be taken."""
        try:
            self._check_open()
        except (ApiError, JaxserveError, BreakerOpenError) as error:
            reason = to_api_error(error)
            return self.error_response(request, dataclasses.replace(reason, status=503))
        return json_response({"status": "ready"})

    async def metrics_text(self, request: web.Request) -> web.StreamResponse:
        """`GET /metrics`."""
        return web.Response(body=self.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def version(self, request: web.Request) -> web.StreamResponse:
        """`GET /version`."""
        return json_response({"version": _version()})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """`GET /openapi.json`."""
        return web.Response(body=self._openapi_json, content_type="application/json")

    def is_open(self, request: web.Request) -> bool:
        """Whether it is about the server or its page, and needs no key."""
        resource = request.match_info.route.resource
        return resource is not None and resource.canonical in self._open_paths

    @cached_property
    def _open_paths(self) -> frozenset[str]:
        """Made when somebody asks for it, once the operations are complete."""
        return frozenset(one.path for one in self.operations if one.is_open)

    @cached_property
    def _openapi_json(self) -> bytes:
        """Made when somebody asks for it, once the operations are complete."""
        names, has_keys = self.context.model_names, bool(self.options.keys)
        document = openapi_document(self.operations, names, version=_version(), has_keys=has_keys)
        return msgspec.json.encode(document)


def build_app(server: Server, extensions: Sequence[Extension] = ()) -> web.Application:
    """The application. Run it with `handler_cancellation=True`: that is how a lost client ends its handler."""
    app = web.Application(
        middlewares=[
            _record(server),
            _json_errors(server.error_response),
            _preflight,
            _require_key(server),
        ],
        client_max_size=server.max_body_bytes,
    )
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat_completions)
    app.router.add_post("/v1/messages", server.messages)
    app.router.add_post("/v1/messages/count_tokens", server.count_tokens)
    app.router.add_post("/v1/responses", server.responses)
    app.router.add_post("/v1/embeddings", server.embeddings)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/v1/models/{name:.+}", server.model)
    app.router.add_get("/health", server.health)
    app.router.add_get("/ready", server.ready)
    app.router.add_get("/metrics", server.metrics_text)
    app.router.add_get("/version", server.version)
    app.router.add_get("/openapi.json", server.openapi)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/detokenize", server.detokenize)
    for extension in extensions:
        extension.attach(app, server)
        server.operations += extension.operations
    app.on_response_prepare.append(cors_headers(server.options.allowed_origins))
    app.on_response_prepare.append(add_request_id)
    return app


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The whole body. Raises: ApiError: it is too large, or broken off or badly compressed."""
    too_large = ApiError(
        413,
        f"the body is larger than {max_bytes} bytes, more than the model's context can need",
        code="body_too_large",
    )
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        message = "the body can't be read: it broke off, or is not compressed as its Content-Encoding says"
        raise ApiError(400, message, code="invalid_body") from None


def json_response(value: object, *, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _json_errors(respond: Callable[[web.Request, ApiError], web.Response]) -> Middleware:
    """Every error becomes JSON; only those that nobody raised on purpose leave a traceback, in the log."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ApiError, JaxserveError, BreakerOpenError) as error:
            return respond(request, to_api_error(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            text = {
                404: f"there is nothing at {request.path!r}",
                405: f"{request.path!r} does not take {request.method}",
            }
            reason = text.get(error.status, error.reason)
            return respond(request, ApiError(error.status, reason, headers=headers))
        except ConnectionError:
            # The client is gone. aiohttp drops the answer quietly; an error that it sees it would log as a bug of ours.
            return web.Response(status=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            logger.exception("%s %r failed (request %s)", request.method, request.path, request[REQUEST_ID])
            return respond(request, to_api_error(error))

    return answer


def _require_key(server: Server) -> Middleware:
    """Let nothing through without a key, except what is open; remember the key's name."""
    keys = server.options.keys

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not keys or server.is_open(request):
            return await handler(request)
        name = keys.name_of(sent_key(request.headers))
        if name is None:
            raise ApiError(
                401,
                "a valid API key is required: Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request[KEY_NAME] = name
        return await handler(request)

    return check


def _record(server: Server) -> Middleware:
    """The outermost one: gives the request its id, and reports what came of it, unless it was about the server."""

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        made = request[RECORD] = new_record(request)
        request[REQUEST_ID] = made.request_id
        status = CLIENT_CLOSED_REQUEST
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            made.key_name = request.get(KEY_NAME, "")
            made.end(status)
            if not server.is_open(request) and request.method != "OPTIONS":
                for report in server.reporters:
                    report(made)

    return record


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's question whether it may call; it comes without a key and about any path."""
    if request.method == "OPTIONS":
        return web.Response(status=204)
    return await handler(request)


def _version() -> str:
    try:
        return importlib.metadata.version("jaxserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
