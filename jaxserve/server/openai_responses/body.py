"""The body of `POST /v1/responses`, and the chat that it asks for.

The rules of `jaxserve.server.protocol` hold here as well. Fields follow OpenAI's Responses API
(https://platform.openai.com/docs/api-reference/responses). Nothing is stored: `store: true` is refused, and absent
means false here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import renamed_params, unsupported
from jaxserve.server.openai_responses.tools import Choice, FunctionTool, chat_choice, chat_tools, tool_params
from jaxserve.server.protocol import (
    CalledFunction,
    ChatCompletionBody,
    ChatMessage,
    ToolCall,
    decode,
    refuse_unhonoured,
)
from jaxserve.server.response_format import JsonSchemaFormat, ResponseFormat

if TYPE_CHECKING:
    from jaxserve.server.conversion import PreparedRequest

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text")


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message: `input_text`, or the `output_text` of an earlier answer."""

    type: str
    text: str | None = None
    # Of an earlier answer; no effect.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    # Of parts of other types, which are refused by their type.
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None
    refusal: Any = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message, a call or its result. `id` and `status` are those of an earlier answer, without effect.

    Attributes:
      type: `message` (also where absent), `function_call` or `function_call_output`.
      role, content: of a message.
      call_id: which call it is, or is the result of.
      name, arguments: of a call; the arguments are the text of a JSON object.
      output: the result.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    # Of items of other types, which are refused by their type.
    summary: Any = None
    encrypted_content: Any = None
    phase: Any = None


class TextFormat(JsonSchemaFormat, kw_only=True):
    """What the answer must look like; the other fields are those of a JSON Schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the answer's text is written."""

    format: TextFormat | None = None
    # Known, not honoured.
    verbosity: Any = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`.

    Attributes:
      model: a name of `/v1/models`.
      input: a text (the user's), or messages, calls and their results.
      instructions: what the model is told before them.
      max_output_tokens: most tokens of the answer; absent: as many as fit.
      temperature, top_p: absent, the model's generation defaults decide.
      top_logprobs, include: each token's logprob and that many alternatives, with `message.output_text.logprobs` in
        `include`.
      text: what the answer must look like.
      tools, tool_choice, parallel_tool_calls: as for chats.
      service_tier, user: as for chats.
    """

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    stream: bool | None = None
    service_tier: str | None = None
    user: str | None = None
    # Labels without effect.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, not honoured.
    store: bool | None = None
    background: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    stream_options: Any = None
    truncation: Any = None
    context_management: Any = None
    moderation: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
_UNHONOURED = (
    "store",
    "background",
    "conversation",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "prompt_cache_retention",
    "reasoning",
    "stream_options",
    "truncation",
    "context_management",
    "moderation",
)


def prepare_response(
    data: bytes, prepare_chat: Callable[[ChatCompletionBody], PreparedRequest]
) -> PreparedRequest:
    """Decode and check a body, and have the chat that it asks for prepared. Raises: InvalidRequestError, ApiError."""
    body = decode(data, ResponsesBody)
    refuse_unhonoured(body, _UNHONOURED, _NEUTRAL)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}", param="max_output_tokens"
        )
    logprobs = _wants_logprobs(body)
    messages, message_names = _messages(body)
    chat = ChatCompletionBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        stream=body.stream,
        service_tier=body.service_tier,
        user=body.user,
        response_format=_response_format(body.text),
        tools=chat_tools(body.tools),
        tool_choice=chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    with renamed_params(_NAMES | message_names | tool_params(body.tools)):
        prepared = prepare_chat(chat)
    params = prepared.prompts[0].params
    return replace(
        prepared,
        endpoint="/v1/responses",
        response_id="resp_" + prepared.response_id.removeprefix("chatcmpl-"),
        repeated={
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "user": body.user,
            "tools": msgspec.to_builtins(body.tools or []),
            "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
            "text": {"format": _echoed(body.text)},
            "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
        },
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):  # the default
        raise unsupported("text.verbosity", "'text.verbosity' is not supported by this server")
    asked = text.format
    if asked is None:
        return None
    schema = JsonSchemaFormat(schema=asked.schema) if asked.type == "json_schema" else None
    return ResponseFormat(type=asked.type, json_schema=schema)


def _wants_logprobs(body: ResponsesBody) -> bool:
    for name in body.include or ():
        if name != _LOGPROBS:
            raise unsupported("include", f"include: {name[:80]!r} is not supported by this server")
    if body.top_logprobs and not body.include:
        raise InvalidRequestError(f"'top_logprobs' needs {_LOGPROBS!r} in 'include'", param="top_logprobs")
    if body.include and body.tools and body.tool_choice != "none":
        raise unsupported("include", "logprobs are not supported together with tools")
    return bool(body.include)


def _echoed(text: TextOptions | None) -> dict[str, Any]:
    if text is None or text.format is None:
        return {"type": "text"}
    fields: dict[str, Any] = msgspec.to_builtins(text.format)
    return {name: value for name, value in fields.items() if value is not None}


def _messages(body: ResponsesBody) -> tuple[list[ChatMessage], dict[str, str]]:
    """(the messages of the chat, what their fields are called here where it is not known from `_NAMES`)."""
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)], names
    if not body.input:
        raise InvalidRequestError("input must not be an empty list", param="input")
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.type == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage(role="assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            path = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function.arguments"
            names[path] = f"{where}.arguments"
            calls.append(_call(where, item))
        elif item.type == "function_call_output":
            call_id = _given(f"{where}.call_id", item.call_id)
            output = "" if item.output == "" else _text(f"{where}.output", item.output)
            messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=output))
        else:
            messages.append(_message(where, item))
        names[f"messages[{len(messages) - 1}]"] = where
    return messages, names


def _message(where: str, item: InputItem) -> ChatMessage:
    if item.type not in (None, "message"):
        raise unsupported(
            f"{where}.type",
            f"{where}: only items of the types 'message', 'function_call' and 'function_call_output' are supported",
        )
    if item.role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(
            f"{where}.role must be 'user', 'assistant', 'system' or 'developer'", param=f"{where}.role"
        )
    return ChatMessage(role=item.role, content=_text(f"{where}.content", item.content))


def _call(where: str, item: InputItem) -> ToolCall:
    return ToolCall(
        id=_given(f"{where}.call_id", item.call_id),
        function=CalledFunction(
            name=_given(f"{where}.name", item.name), arguments=_given(f"{where}.arguments", item.arguments)
        ),
    )


def _given(where: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"missing field '{where}'", param=where, code="missing_field")
    return value


def _text(where: str, content: str | list[InputPart] | None) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequestError(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        if part.type not in _TEXT_PARTS:
            raise unsupported(
                f"{path}.type", f"{path}: only parts of the type {' or '.join(_TEXT_PARTS)} are supported"
            )
        if part.text is None:
            raise InvalidRequestError(f"{path}.text is missing", param=f"{path}.text")
        texts.append(part.text)
    return "\n".join(texts)
