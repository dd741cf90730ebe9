"""Answers of `POST /v1/messages`, whole and streamed, and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.outputs import RequestOutput
from jaxserve.server.answer_blocks import AnswerBlocks, Block, BlockDelta
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.errors import ApiError, encodable
from jaxserve.server.responses import Piece, PieceMaker, Usage
from jaxserve.server.stream import event
from jaxserve.tool_calls.deltas import ToolCallDelta

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error_body(error: ApiError) -> bytes:
    """An error response. The shape has no place for the offending field, so it is in the message."""
    if error.param is not None and error.param not in error.message:
        error = replace(error, message=f"{error.param}: {error.message}")
    return msgspec.json.encode(_error(error))


class MessageBuilder:
    """Collects a whole answer."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._answer = AnswerBlocks()
        self._last: Piece | None = None

    def add(self, output: RequestOutput) -> None:
        """Raises: ApiError: the engine could not finish it."""
        for piece in self._maker.pieces(output):
            self._answer.add(piece)
            self._last = piece

    def to_json(self) -> dict[str, Any]:
        """The response body."""
        assert self._last is not None, "nothing has come"
        self._answer.end()
        return {
            **_message(self._prepared, [_whole_block(block) for block in self._answer.blocks]),
            **_end(self._last),
            "usage": _usage(self._maker.usage),
        }


class MessageEvents:
    """Makes the events of a stream; see `stream.EventSource`."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._answer = AnswerBlocks()
        self._last: Piece | None = None

    def events(self, output: RequestOutput) -> bytes:
        return b"".join([self._piece(piece) for piece in self._maker.pieces(output)])

    def end(self) -> bytes:
        assert self._last is not None, "nothing has come"
        usage = {"output_tokens": self._maker.usage.completion_tokens}
        return (
            self._deltas(self._answer.end())
            + _event({"type": "content_block_stop", "index": len(self._answer.blocks) - 1})
            + _event({"type": "message_delta", "delta": _end(self._last), "usage": usage})
            + _event({"type": "message_stop"})
        )

    def failure(self, error: ApiError) -> bytes:
        return _event(_error(error))

    def _piece(self, piece: Piece) -> bytes:
        begin = b"" if self._last is not None else self._begin()
        self._last = piece
        return begin + self._deltas(self._answer.add(piece))

    def _begin(self) -> bytes:
        usage = {**_usage(self._maker.usage), "output_tokens": 0}
        message = {
            **_message(self._prepared, []),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event({"type": "message_start", "message": message})

    def _deltas(self, deltas: list[BlockDelta]) -> bytes:
        events = []
        for delta in deltas:
            block, place = delta.block, {"index": delta.block.index}
            if delta.is_new:
                if block.index:
                    events.append(_event({"type": "content_block_stop", "index": block.index - 1}))
                content = {"type": "text", "text": ""} if block.call is None else _tool_use(block.call, {})
                events.append(_event({"type": "content_block_start", **place, "content_block": content}))
            if delta.text:
                change = (
                    {"type": "text_delta", "text": delta.text}
                    if block.call is None
                    else {"type": "input_json_delta", "partial_json": delta.text}
                )
                events.append(_event({"type": "content_block_delta", **place, "delta": change}))
        return b"".join(events)


def _whole_block(block: Block) -> dict[str, Any]:
    if block.call is None:
        return {"type": "text", "text": block.text}
    try:
        arguments = msgspec.json.decode(block.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        arguments = {"INVALID_JSON": block.text}  # as Anthropic advises clients to do
    return _tool_use(block.call, arguments)


def _tool_use(call: ToolCallDelta, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _message(prepared: PreparedRequest, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": prepared.response_id,
        "type": "message",
        "role": "assistant",
        "model": prepared.model,
        "content": content,
    }


def _end(piece: Piece) -> dict[str, str | None]:
    stopped = isinstance(piece.stop_reason, str)
    if piece.finish_reason == "length":
        reason = "max_tokens"
    elif piece.finish_reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "stop_sequence" if stopped else "end_turn"
    return {"stop_reason": reason, "stop_sequence": str(piece.stop_reason) if stopped else None}


def _usage(usage: Usage) -> dict[str, int]:
    """`input_tokens` are those that were computed; the others came from the cache, which nobody asked to be filled."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": encodable(error.message)}}
