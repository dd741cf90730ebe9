"""How each endpoint words what the engine makes of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.outputs import RequestOutput
from jaxserve.server.anthropic.answer import MessageBuilder, MessageEvents, message_error_body
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.embeddings import EmbeddingsBuilder
from jaxserve.server.errors import ApiError, error_body
from jaxserve.server.openai_responses.answer import ResponseEvents, ResponseObjectBuilder
from jaxserve.server.responses import ChunkBuilder, ResponseBuilder, Usage
from jaxserve.server.stream import EventSource, event

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """A whole answer while it is collected."""

    def add(self, output: RequestOutput) -> None:
        """Raises: ApiError: the engine could not finish a choice."""

    def to_json(self) -> dict[str, Any] | msgspec.Struct:
        """The response body, once the last output has come."""


class ChunkEvents:
    """The chunks of the two oldest endpoints, `[DONE]` last; see `stream.EventSource`."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._builder = ChunkBuilder(prepared, tokenizer)
        self._include_usage = prepared.include_usage

    def events(self, output: RequestOutput) -> bytes:
        return b"".join([event(chunk) for chunk in self._builder.chunks(output)])

    def end(self) -> bytes:
        return (event(self._builder.usage_chunk()) if self._include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


class CountedAnswer(Answer, Protocol):
    """One that says when it is whole, and what it took."""

    @property
    def is_complete(self) -> bool: ...
    @property
    def usage(self) -> Usage: ...


def batch_answer(prepared: PreparedRequest, tokenizer: Tokenizer) -> CountedAnswer:
    """Of a line of a batch file."""
    if prepared.endpoint == "/v1/embeddings":
        return EmbeddingsBuilder(prepared)
    return ResponseBuilder(prepared, tokenizer)


def whole_answer(prepared: PreparedRequest, tokenizer: Tokenizer) -> Answer:
    """Of a request that is not streamed."""
    if prepared.endpoint == "/v1/messages":
        return MessageBuilder(prepared, tokenizer)
    if prepared.endpoint == "/v1/responses":
        return ResponseObjectBuilder(prepared, tokenizer)
    return batch_answer(prepared, tokenizer)


def streamed_answer(prepared: PreparedRequest, tokenizer: Tokenizer) -> EventSource:
    """Of one that is."""
    if prepared.endpoint == "/v1/messages":
        return MessageEvents(prepared, tokenizer)
    if prepared.endpoint == "/v1/responses":
        return ResponseEvents(prepared, tokenizer)
    return ChunkEvents(prepared, tokenizer)


def endpoint_error_body(path: str, error: ApiError) -> bytes:
    """An error response in the shape that clients of that path read."""
    return message_error_body(error) if path.startswith("/v1/messages") else error_body(error)
