"""OpenTelemetry: a span for every request for the model, with its phases as children, sent by OTLP over HTTP.

Spans are made when a request has ended, out of its record, so nothing is paid for them while it runs. Names of
attributes are those of the semantic conventions for generative AI, and vLLM's where these have none.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve.outputs import RequestTiming
from jaxserve.server.openapi import Operation
from jaxserve.server.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from jaxserve.server.app import Server

SPAN_NAME = "llm_request"
_FLUSH_MILLISECONDS = 5_000
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class Tracing:
    """An extension of the server that reports its requests to a collector.

    Args:
      endpoint: URL that takes OTLP traces, usually `http://HOST:4318/v1/traces`.

    Raises:
      ConfigError: OpenTelemetry is not installed, or `endpoint` is no URL.
    """

    operations: tuple[Operation, ...] = ()

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint}: must begin with http:// or https://")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry: pip install 'jaxserve[otel]' ({error})"
            ) from None
        self._server_kind, self._error_code = SpanKind.SERVER, StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()
        name = os.environ.get("OTEL_SERVICE_NAME", "jaxserve")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Tracer = self._provider.get_tracer("jaxserve", _version())

    def attach(self, app: web.Application, server: Server) -> None:
        """Be told of requests."""
        server.reporters.append(self.report)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Send what is there; the rest when the server is closed."""
        await asyncio.to_thread(self._provider.force_flush, _FLUSH_MILLISECONDS)

    def close(self) -> None:
        """Send the last ones."""
        self._provider.shutdown()

    def report(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        if not record.is_generation or record.ended is None:
            return
        clock = _WallClock()
        parent: Context = self._propagator.extract(dict(record.trace_headers))
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=self._server_kind,
            attributes=request_attributes(record),
            start_time=clock.nanoseconds(record.started),
        )
        if span.is_recording():
            if record.error is not None or (record.status or 0) >= 400:
                span.set_status(self._error_code, record.error or f"HTTP {record.status}")
            from opentelemetry.trace import set_span_in_context

            inside = set_span_in_context(span, parent)
            for (_, index), timing in record.timings.items():
                for name, start, end in phases(timing):
                    child = self._tracer.start_span(
                        name,
                        context=inside,
                        attributes={"gen_ai.choice.index": index},
                        start_time=clock.nanoseconds(start),
                    )
                    child.end(clock.nanoseconds(end))
        span.end(clock.nanoseconds(record.ended))


def request_attributes(record: RequestRecord) -> dict[str, str | int | float | list[str]]:
    """What a request's span says. Absent: what is not known."""
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "http.request.method": record.method,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "error.type": record.error,
        "gen_ai.latency.e2e": record.total_seconds,
    }
    if record.prepared is not None:
        params = record.prepared.prompts[0].params
        attributes |= {
            "gen_ai.operation.name": _OPERATIONS.get(record.prepared.endpoint, "chat"),
            "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.prepared.response_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
            "gen_ai.usage.num_sequences": record.prepared.num_choices,
            "gen_ai.latency.time_in_queue": record.queue_seconds,
            "gen_ai.latency.time_to_first_token": record.ttft_seconds,
            **_usage(record),
            **_model_times(record),
        }
    return {name: value for name, value in attributes.items() if value is not None}


def phases(timing: RequestTiming) -> list[tuple[str, float, float]]:
    """(name, start, end) of what a choice went through, in seconds of the engine's clock."""
    moments = (timing.arrival, timing.scheduled, timing.first_token, timing.last_token)
    return [
        (name, start, end)
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False)
        if start is not None and end is not None
    ]


def _usage(record: RequestRecord) -> dict[str, int]:
    """By the names of today's conventions, and by the older ones that vLLM uses."""
    return {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
    }


def _model_times(record: RequestRecord) -> dict[str, float]:
    """Of the first choice."""
    for timing in record.timings.values():
        took = {name: end - start for name, start, end in phases(timing) if name != "queue"}
        if len(took) == 2:
            took["inference"] = took["prefill"] + took["decode"]
        return {f"gen_ai.latency.time_in_model_{name}": seconds for name, seconds in took.items()}
    return {}


class _WallClock:
    """Turns moments of the monotonic clock into Unix time."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def nanoseconds(self, moment: float) -> int:
        return int(moment * 1e9) + self._offset


def _version() -> str:
    try:
        return importlib.metadata.version("jaxserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
