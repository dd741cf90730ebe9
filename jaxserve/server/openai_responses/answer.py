"""Answers of `POST /v1/responses`, whole and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.outputs import RequestOutput
from jaxserve.server.answer_blocks import AnswerBlocks, Block, BlockDelta
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.errors import ApiError, encodable
from jaxserve.server.responses import Piece, PieceMaker, Usage
from jaxserve.server.stream import event
from jaxserve.tool_calls.deltas import ToolCallDelta

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class _Answer:
    """A response while it is made: messages, each with one part, a text; and function calls."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._answer = AnswerBlocks()
        self._id = prepared.response_id.removeprefix("resp_")
        self.logprobs: list[dict[str, Any]] = []  # of the text, where there are no calls
        self._finish_reason: str | None = None

    def add(self, output: RequestOutput) -> list[tuple[BlockDelta, list[dict[str, Any]]]]:
        """What is new, each with its logprobs. Raises: ApiError: the engine could not finish it."""
        news = []
        for piece in self._maker.pieces(output):
            logprobs = _logprobs_of(piece)
            self.logprobs += logprobs
            self._finish_reason = piece.finish_reason
            news += [(delta, logprobs) for delta in self._answer.add(piece, wants_text=bool(logprobs))]
        return news

    def end(self) -> list[BlockDelta]:
        """No more output comes."""
        return self._answer.end()

    @property
    def last_block(self) -> Block:
        return self._answer.blocks[-1]

    @property
    def status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def item_id(self, block: Block) -> str:
        if block.call is not None:
            return f"fc_{self._id}_{block.index}"
        return f"msg_{self._id}" if not block.index else f"msg_{self._id}_{block.index}"

    def item(self, block: Block) -> dict[str, Any]:
        """As it is in the end. Only the last one may be incomplete."""
        status = self.status if block is self.last_block else "completed"
        if block.call is not None:
            return _call_item(self.item_id(block), status, block.call, block.text)
        return _item(self.item_id(block), status, [_part(block.text, self.logprobs)])

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
            "output": [self.item(block) for block in self._answer.blocks] if has_ended else [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": prepared.service_tier or "default",
            "store": False,
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
        self._answer.end()
        return self._answer.response(self._answer.status)


class ResponseEvents:
    """Makes the events of a stream; see `stream.EventSource`."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._answer = _Answer(prepared, tokenizer)
        self._open: Block | None = None
        self._sent = 0

    def events(self, output: RequestOutput) -> bytes:
        news = self._answer.add(output)  # raises before anything counts as sent
        begin = b"" if self._sent else self._begin()
        return begin + b"".join([self._delta(delta, logprobs) for delta, logprobs in news])

    def end(self) -> bytes:
        answer = self._answer
        rest = b"".join([self._delta(delta, []) for delta in answer.end()])
        return rest + self._close() + self._event(answer.status, response=answer.response(answer.status))

    def failure(self, error: ApiError) -> bytes:
        return self._event("failed", response=self._answer.response("failed", error=error))

    def _begin(self) -> bytes:
        response = self._answer.response("in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def _delta(self, delta: BlockDelta, logprobs: list[dict[str, Any]]) -> bytes:
        block = delta.block
        begin = self._close() + self._begin_item(block) if delta.is_new else b""
        if not delta.text and not logprobs:
            return begin
        if block.call is not None:
            return begin + self._event(
                "function_call_arguments.delta", **self._place(block), delta=delta.text
            )
        return begin + self._event(
            "output_text.delta", **self._place(block), delta=delta.text, logprobs=logprobs
        )

    def _begin_item(self, block: Block) -> bytes:
        self._open = block
        item_id = self._answer.item_id(block)
        if block.call is not None:
            item = _call_item(item_id, "in_progress", block.call, "")
            return self._event("output_item.added", output_index=block.index, item=item)
        item = _item(item_id, "in_progress", [])
        return self._event("output_item.added", output_index=block.index, item=item) + self._event(
            "content_part.added", **self._place(block), part=_part("", [])
        )

    def _close(self) -> bytes:
        """The end of the item that is open, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return b""
        item, place = self._answer.item(block), self._place(block)
        if block.call is not None:
            ended = self._event(
                "function_call_arguments.done", **place, name=block.call.name, arguments=block.text
            )
        else:
            [part] = item["content"]
            ended = self._event(
                "output_text.done", **place, text=part["text"], logprobs=part["logprobs"]
            ) + self._event("content_part.done", **place, part=part)
        return ended + self._event("output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._answer.item_id(block), "output_index": block.index}
        return place if block.call is not None else {**place, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        number, self._sent = self._sent, self._sent + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _logprobs_of(piece: Piece) -> list[dict[str, Any]]:
    """Of its tokens, in the chat's shape, which is the one of a text part as well."""
    return [] if piece.logprobs is None else list(piece.logprobs["content"] or ())


def _item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(item_id: str, status: str, call: ToolCallDelta, arguments: str) -> dict[str, Any]:
    called = {"call_id": call.id, "name": call.name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **called}


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
