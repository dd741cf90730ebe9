"""What is known of an HTTP request when it has ended, for logs and traces. Nothing of its texts, nor its key."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from aiohttp.hdrs import METH_ALL

from jaxserve.outputs import RequestOutput, RequestTiming
from jaxserve.request import FinishReason
from jaxserve.server.request_id import choose_request_id

if TYPE_CHECKING:
    from jaxserve.server.conversion import PreparedRequest

MAX_TRACED_CHOICES = 16  # times are kept of so many


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of `time.monotonic`, the engine's clock.

    Attributes:
      endpoint: the route, with names in the place of what the client chose; "" where there is none.
      trace_headers: of W3C Trace Context, as the client sent them.
      method: "-" for one that is none of HTTP's.
      status: of the answer; 499 where the client had gone; of another stream that has begun 200, whatever came of it.
      error: the code of an error, also of one inside a stream.
      is_generation: it was one for the model.
      model: that is served, and was asked for; "" before the body has been understood.
      num_choices, num_open: that were asked for; that have not ended by themselves.
      cached_tokens: of the prompts.
      finish_reasons: why choices ended, each once.
      timings: of the first choices, the latest known.
    """

    request_id: str
    method: str
    endpoint: str
    trace_headers: Mapping[str, str]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    status: int | None = None
    error: str | None = None
    key_name: str = ""
    is_generation: bool = False
    model: str = ""
    is_stream: bool = False
    prepared: PreparedRequest | None = None
    num_open: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    timings: dict[tuple[str, int], RequestTiming] = field(default_factory=dict)
    _cached: dict[str, int] = field(default_factory=dict)

    def begin(self, prepared: PreparedRequest) -> None:
        """The body has been understood, and goes to the engine."""
        self.prepared = prepared
        self.model, self.is_stream = prepared.model, prepared.stream
        self.prompt_tokens = sum(len(one.prompt_token_ids) for one in prepared.prompts)
        self.num_open = prepared.num_choices

    def add(self, output: RequestOutput) -> None:
        """Something has come of a choice."""
        self.completion_tokens += len(output.token_ids)
        if output.timing is not None:
            self._cached[output.request_id] = output.num_cached_tokens
            choice = (output.request_id, output.index)
            if choice in self.timings or len(self.timings) < MAX_TRACED_CHOICES:
                self.timings[choice] = output.timing
        if output.finish_reason is not None:
            self.num_open -= 1
            self._ended_by(output.finish_reason)

    def end(self, status: int) -> None:
        """The answer is complete, or nobody waits for it any more."""
        self.status, self.ended = status, time.monotonic()
        if self.num_open:
            self._ended_by(FinishReason.ABORT)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def total_seconds(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def queue_seconds(self) -> float | None:
        """Until the first choice was computed; None: none was, or it is not known."""
        return _since_arrival([(one.arrival, one.scheduled) for one in self.timings.values()])

    @property
    def ttft_seconds(self) -> float | None:
        """Until the first token of any choice."""
        return _since_arrival([(one.arrival, one.first_token) for one in self.timings.values()])

    def _ended_by(self, reason: FinishReason) -> None:
        if reason.value not in self.finish_reasons:
            self.finish_reasons.append(reason.value)


class Reporter(Protocol):
    """Told of every request that has ended."""

    def __call__(self, record: RequestRecord) -> None: ...


RECORD = web.RequestKey("record", RequestRecord)

_TRACE_HEADERS = ("traceparent", "tracestate")


def new_record(request: web.Request) -> RequestRecord:
    """Of a request that has just come. A path that leads nowhere, and a method made up, are not kept."""
    resource = request.match_info.route.resource
    return RequestRecord(
        request_id=choose_request_id(request.headers),
        method=request.method if request.method in METH_ALL else "-",
        endpoint="" if resource is None else resource.canonical,
        trace_headers={name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers},
    )


def _since_arrival(pairs: list[tuple[float, float | None]]) -> float | None:
    seconds = [then - arrival for arrival, then in pairs if then is not None]
    return min(seconds) if seconds else None
