"""Answers of `POST /v1/responses`, whole and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.outputs import RequestOutput
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.errors import ApiError, encodable
from jaxserve.server.responses import Piece, PieceMaker, Usage
from jaxserve.server.stream import event

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

_PLACE = {"output_index": 0, "content_index": 0}


class _Answer:
    """A response while it is made: one message, with one part, a text."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self.item_id = "msg_" + prepared.response_id.removeprefix("resp_")

    def add(self, output: RequestOutput) -> list[Piece]:
        """Raises: ApiError: the engine could not finish it."""
        pieces = self._maker.pieces(output)
        for piece in pieces:
            self._texts.append(piece.text)
            self.logprobs += _logprobs_of(piece)
            self._finish_reason = piece.finish_reason
        return pieces

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def part(self) -> dict[str, Any]:
        return _part(self.text, self.logprobs)

    def item(self) -> dict[str, Any]:
        return _item(self.item_id, self.status, [self.part()])

    def response(self, status: str, *, error: ApiError | None = None) -> dict[str, Any]:
        """The response object. It holds an output and counts once it has ended."""
        prepared, has_ended = self._prepared, status in ("completed", "incomplete")
        return {
            "id": prepared.response_id,
            "object": "response",
            "created_at": prepared.created,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": "server_error", "message": encodable(error.message)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": prepared.model,
            "output": [self.item()] if has_ended else [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": prepared.service_tier or "default",
            "store": False,
            "tools": [],
            "truncation": "disabled",
            "usage": _usage(self._maker.usage) if has_ended else None,
            **prepared.repeated,
        }


class ResponseObjectBuilder:
    """Collects a whole answer."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._answer = _Answer(prepared, tokenizer)

    def add(self, output: RequestOutput) -> None:
        """Raises: ApiError: the engine could not finish it."""
        self._answer.add(output)

    def to_json(self) -> dict[str, Any]:
        """The response body."""
        return self._answer.response(self._answer.status)


class ResponseEvents:
    """Makes the events of a stream; see `stream.EventSource`."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._answer = _Answer(prepared, tokenizer)
        self._sent = 0

    def events(self, output: RequestOutput) -> bytes:
        pieces = self._answer.add(output)  # raises before anything counts as sent
        begin = b"" if self._sent else self._begin()
        return begin + b"".join([self._delta(piece) for piece in pieces])

    def end(self) -> bytes:
        answer = self._answer
        place = {"item_id": answer.item_id, **_PLACE}
        return (
            self._event("output_text.done", **place, text=answer.text, logprobs=answer.logprobs)
            + self._event("content_part.done", **place, part=answer.part())
            + self._event("output_item.done", output_index=0, item=answer.item())
            + self._event(answer.status, response=answer.response(answer.status))
        )

    def failure(self, error: ApiError) -> bytes:
        return self._event("failed", response=self._answer.response("failed", error=error))

    def _begin(self) -> bytes:
        answer = self._answer
        item = _item(answer.item_id, "in_progress", [])
        return (
            self._event("created", response=answer.response("in_progress"))
            + self._event("in_progress", response=answer.response("in_progress"))
            + self._event("output_item.added", output_index=0, item=item)
            + self._event("content_part.added", item_id=answer.item_id, **_PLACE, part=_part("", []))
        )

    def _delta(self, piece: Piece) -> bytes:
        logprobs = _logprobs_of(piece)
        if not piece.text and not logprobs:
            return b""
        place = {"item_id": self._answer.item_id, **_PLACE}
        return self._event("output_text.delta", **place, delta=piece.text, logprobs=logprobs)

    def _event(self, name: str, **fields: Any) -> bytes:
        kind = f"response.{name}"
        number, self._sent = self._sent, self._sent + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _logprobs_of(piece: Piece) -> list[dict[str, Any]]:
    """Of its tokens, in the chat's shape, which is the one of a text part as well."""
    return [] if piece.logprobs is None else list(piece.logprobs["content"] or ())


def _item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
