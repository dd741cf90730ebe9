"""Response bodies, streamed and not, out of the engine's outputs. No HTTP here: batch files use it as well.

`PieceMaker` turns the engine's outputs into text, logprobs and token ids in the endpoint's shapes; `ResponseBuilder`
collects whole answers from its pieces, `ChunkBuilder` wraps each in a chunk. So the two can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.outputs import RequestOutput, TokenLogprobs
from jaxserve.request import FinishReason
from jaxserve.server.conversion import PreparedRequest
from jaxserve.server.errors import ApiError
from jaxserve.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from jaxserve.server.tool_use import call_json
from jaxserve.tool_calls.deltas import ParsedText, ToolCallDelta
from jaxserve.tool_calls.parser import ToolCallParser

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


@dataclass(slots=True)
class Usage:
    """Token counts of an answer so far; a prompt counts once, however many choices it has."""

    _prompt: dict[int, tuple[int, int]] = field(default_factory=dict)  # prompt -> (tokens, cached)
    _output: dict[int, int] = field(default_factory=dict)  # choice -> tokens
    _drafts: dict[int, tuple[int, int]] = field(default_factory=dict)  # choice -> (verified, accepted)

    def add(self, prompt: int, choice: int, output: RequestOutput) -> None:
        """Take over an output's totals."""
        self._output[choice] = output.num_output_tokens
        if output.num_draft_tokens:
            self._drafts[choice] = output.num_draft_tokens, output.num_accepted_tokens
        if output.index == 0 or prompt not in self._prompt:
            self._prompt[prompt] = (output.num_prompt_tokens, output.num_cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._prompt.values())

    @property
    def cached_tokens(self) -> int:
        """Those of the prompts that had been computed before."""
        return sum(cached for _, cached in self._prompt.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._output.values())

    def to_json(self) -> dict[str, Any]:
        """The `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self._drafts:
            drafted = sum(drafted for drafted, _ in self._drafts.values())
            accepted = sum(accepted for _, accepted in self._drafts.values())
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage


@dataclass(slots=True)
class Piece:
    """What one output adds to a choice, in the endpoint's own shapes.

    Attributes:
      choice: index in the answer.
      text: without that of tool calls.
      tool_calls: what is new of them, one delta a call.
      finish_reason: "tool_calls" where the choice ended by itself and all its calls are complete.
      logprobs: for completions the four lists, for chat the `{"content": ...}` object, None where not asked for.
      prompt_logprobs: the extension field, with the first piece of a prompt's first choice, where asked for.
      prompt_token_ids: with the first piece, where token ids are asked for.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class PieceMaker:
    """Turns the engine's outputs into pieces, and counts usage on the way.

    A choice whose echo needs the prompt's logprobs waits until they have come with choice 0.
    """

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._prompt_index = {request.request_id: i for i, request in enumerate(prepared.prompts)}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._waiting: dict[int, list[RequestOutput]] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._num_chars: dict[int, int] = {}
        self._parsers: dict[int, ToolCallParser] = {}
        self.usage = Usage()

    def pieces(self, output: RequestOutput) -> list[Piece]:
        """What an output adds; often one piece, none while its choice waits, more when it stops waiting.

        Raises:
          ApiError: the engine could not finish the choice.
        """
        raise_if_failed(output)
        prompt = self._prompt_index[output.request_id]
        choice = prompt * self._prepared.n + output.index
        self.usage.add(prompt, choice, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
            return [self._piece(prompt, output), *self._release(prompt)]
        if self._needs_prompt_logprobs(output.index) and prompt not in self._prompt_logprobs:
            if output.index == 0 and output.finish_reason is not None:
                raise ApiError(
                    500, "the prompt's logprobs are missing", type="server_error", code="generation_failed"
                )
            self._waiting.setdefault(prompt, []).append(output)
            return []
        return [self._piece(prompt, output)]

    def _needs_prompt_logprobs(self, index: int) -> bool:
        return self._prepared.echo_logprobs or (self._prepared.wants_prompt_logprobs and index == 0)

    def _release(self, prompt: int) -> list[Piece]:
        return [self._piece(prompt, output) for output in self._waiting.pop(prompt, [])]

    def _piece(self, prompt: int, output: RequestOutput) -> Piece:
        prepared = self._prepared
        choice = prompt * prepared.n + output.index
        is_first = choice not in self._num_chars
        echo = prepared.echo_texts[prompt] if is_first and prepared.echo_texts is not None else ""
        text = echo + output.text
        self._num_chars[choice] = self._num_chars.get(choice, 0) + len(text)
        piece = Piece(
            choice=choice,
            text=text,
            token_ids=output.token_ids,
            logprobs=self._piece_logprobs(prompt, choice, echo, output, is_first=is_first),
            finish_reason=None if output.finish_reason is None else output.finish_reason.value,
            stop_reason=output.stop_reason,
        )
        if is_first and prepared.wants_prompt_logprobs and output.index == 0:
            piece.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt_logprobs.get(prompt, []))
        if is_first and prepared.return_token_ids:
            piece.prompt_token_ids = list(prepared.prompts[prompt].prompt_token_ids)
        self._find_calls(piece)
        return piece

    def _find_calls(self, piece: Piece) -> None:
        """Divide the piece's text into content and tool calls."""
        if self._prepared.tool_use is None:
            return
        parser = self._parsers.setdefault(piece.choice, self._prepared.tool_use.parser())
        parsed = parser.feed(piece.text)
        piece.text, piece.tool_calls = parsed.content, parsed.calls
        if piece.finish_reason is None:
            return
        rest: ParsedText = parser.finish()
        piece.text += rest.content
        if piece.finish_reason == "stop" and parser.num_calls and not parser.has_broken_call:
            piece.finish_reason = "tool_calls"

    def _piece_logprobs(
        self, prompt: int, choice: int, echo: str, output: RequestOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        prepared = self._prepared
        if prepared.num_logprobs is None:
            return None
        entries = output.logprobs or []
        if prepared.is_chat:
            return chat_logprobs(self._tokenizer, entries, prepared.num_logprobs)
        request = prepared.prompts[prompt]
        lists: dict[str, list[Any]] = {}
        if is_first:
            self._logprobs[choice] = CompletionLogprobs(
                self._tokenizer,
                prepared.num_logprobs,
                skip_special_tokens=request.params.skip_special_tokens,
            )
            if prepared.echo_logprobs:
                lists = self._logprobs[choice].add_prompt(
                    echo, request.prompt_token_ids, self._prompt_logprobs[prompt]
                )
        limit = self._num_chars[choice] if output.finish_reason is not None else None
        new = self._logprobs[choice].add([entry.token_id for entry in entries], entries, limit=limit)
        return merge_logprobs(lists, new)


def raise_if_failed(output: RequestOutput) -> None:
    """Raises: ApiError: the engine could not finish a choice."""
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        reason = output.error or "the request was aborted"
        raise ApiError(500, reason, type="server_error", code="generation_failed")


def _tier(prepared: PreparedRequest) -> dict[str, str]:
    return {} if prepared.service_tier is None else {"service_tier": prepared.service_tier}


def merge_logprobs(left: dict[str, list[Any]], right: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two sets of lists, one after the other."""
    return {name: [*left.get(name, ()), *values] for name, values in right.items()}


def add_call_deltas(calls: list[ToolCallDelta], deltas: list[ToolCallDelta]) -> None:
    """Complete `calls`, whole ones so far, by what is new."""
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(delta)
        else:
            calls[delta.index].arguments += delta.arguments


class _Choice:
    """A choice of a whole answer while it is collected."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
        self.prompt_token_ids: list[int] | None = None
        self.tool_calls: list[ToolCallDelta] = []

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        add_call_deltas(self.tool_calls, piece.tool_calls)
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = piece.logprobs
            else:
                for name, values in piece.logprobs.items():
                    if values is not None:
                        self.logprobs[name] += values
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.prompt_token_ids is not None:
            self.prompt_token_ids = piece.prompt_token_ids


class ResponseBuilder:
    """Collects outputs until every choice has ended, then makes the response body."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._choices = [_Choice() for _ in range(prepared.num_choices)]

    def add(self, output: RequestOutput) -> None:
        """Raises: ApiError: the engine could not finish a choice."""
        for piece in self._maker.pieces(output):
            self._choices[piece.choice].add(piece)

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def usage(self) -> Usage:
        return self._maker.usage

    def to_json(self) -> dict[str, Any]:
        """The response body, JSON-ready."""
        prepared = self._prepared
        body: dict[str, Any] = {
            "id": prepared.response_id,
            "object": "chat.completion" if prepared.is_chat else "text_completion",
            "created": prepared.created,
            "model": prepared.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self._maker.usage.to_json(),
        }
        return body | _tier(prepared)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        result: dict[str, Any] = {"index": index}
        if self._prepared.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.tool_calls:
                message["content"] = text or None
                message["tool_calls"] = [call_json(call, in_stream=False) for call in choice.tool_calls]
            result["message"] = message
        else:
            result["text"] = text
        result["logprobs"] = choice.logprobs
        result["finish_reason"] = choice.finish_reason
        result["stop_reason"] = choice.stop_reason
        if choice.prompt_logprobs is not None:
            result["prompt_logprobs"] = choice.prompt_logprobs
        if self._prepared.return_token_ids:
            result["token_ids"] = choice.token_ids
            result["prompt_token_ids"] = choice.prompt_token_ids
        return result


class ChunkBuilder:
    """Wraps pieces in the chunks of a stream."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._maker = PieceMaker(prepared, tokenizer)
        self._begun: set[int] = set()
        self._told: set[int] = set()  # choices of which there was text or a call
        self._may_call = prepared.tool_use is not None

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks for an output: for chat, the choice's first brings the role and its last only the end.

        Raises:
          ApiError: the engine could not finish the choice.
        """
        result: list[dict[str, Any]] = []
        for piece in self._maker.pieces(output):
            if self._prepared.is_chat:
                result += self._chat_chunks(piece)
            elif self._has_news(piece) or piece.finish_reason is not None:
                result.append(self._completion_chunk(piece))
        return result

    def usage_chunk(self) -> dict[str, Any]:
        """The one that brings the counts, and no choices."""
        return {**self._head(), "choices": [], "usage": self._maker.usage.to_json()}

    def _head(self) -> dict[str, Any]:
        prepared = self._prepared
        return {
            "id": prepared.response_id,
            "object": "chat.completion.chunk" if prepared.is_chat else "text_completion",
            "created": prepared.created,
            "model": prepared.model,
            **_tier(prepared),
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        if self._prepared.include_usage:
            chunk["usage"] = None
        return chunk

    def _completion_chunk(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }
        self._add_extensions(choice, piece)
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return self._chunk(choice)

    def _chat_chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            # Where there may be nothing but calls, it is the next chunks that say whether there is any content.
            begun_as = None if self._may_call else ""
            chunks.append(self._chat_chunk(piece.choice, {"role": "assistant", "content": begun_as}))
        if self._has_news(piece):
            delta: dict[str, Any] = {"content": piece.text} if piece.text or not self._may_call else {}
            if piece.tool_calls:
                delta["tool_calls"] = [call_json(call, in_stream=True) for call in piece.tool_calls]
            if piece.text or piece.tool_calls:
                self._told.add(piece.choice)
            chunk = self._chat_chunk(piece.choice, delta, logprobs=piece.logprobs)
            self._add_extensions(chunk["choices"][0], piece)
            chunks.append(chunk)
        if piece.finish_reason is not None:
            is_empty = self._may_call and piece.choice not in self._told
            delta = {"content": ""} if is_empty else {}
            chunk = self._chat_chunk(piece.choice, delta, finish_reason=piece.finish_reason)
            chunk["choices"][0]["stop_reason"] = piece.stop_reason
            chunks.append(chunk)
        return chunks

    def _chat_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(choice)

    def _has_news(self, piece: Piece) -> bool:
        """False for a token whose text is held back or empty, where nothing else about it was asked for."""
        wants_tokens = self._prepared.return_token_ids or piece.logprobs is not None
        return (
            bool(piece.text or piece.tool_calls)
            or (wants_tokens and bool(piece.token_ids))
            or piece.prompt_logprobs is not None
        )

    def _add_extensions(self, choice: dict[str, Any], piece: Piece) -> None:
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        if self._prepared.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt_token_ids is not None:
                choice["prompt_token_ids"] = piece.prompt_token_ids
