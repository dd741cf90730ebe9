"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and the chat that they ask for.

The rules of `jaxserve.server.protocol` hold here as well. Fields follow Anthropic's Messages API
(https://docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.chat_prompt import encode_conversation
from jaxserve.server.errors import renamed_params, unsupported
from jaxserve.server.protocol import ChatCompletionBody, ChatMessage, decode, refuse_unhonoured
from jaxserve.server.response_format import JsonSchemaFormat, ResponseFormat

if TYPE_CHECKING:
    from jaxserve.server.conversion import PreparedRequest, ServingContext

# What the chat calls its fields, and what they are called here.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format.json_schema.schema": "output_config.format.schema",
}


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of text. `cache_control` is a hint that prefix caching here needs not; it has no effect."""

    type: str
    text: str | None = None
    cache_control: Any = None
    citations: Any = None
    # Of blocks of other types, which are refused by their type.
    source: Any = None
    id: Any = None
    name: Any = None
    input: Any = None
    tool_use_id: Any = None
    content: Any = None
    is_error: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. An assistant's that is the last one is left open, and the answer goes on where it stops."""

    role: str
    content: str | list[TextBlock]


class Metadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`user_id` names who asks; users share the engine fairly."""

    user_id: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema that the answer keeps to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the answer must look like."""

    format: OutputFormat | None = None
    # Known, not honoured.
    effort: Any = None


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/messages/count_tokens`.

    Attributes:
      model: a name of `/v1/models`.
      messages: turns of the roles `user` and `assistant`.
      system: what the model is told before them.
      output_config: what the answer must look like.
    """

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    output_config: OutputConfig | None = None
    # Known, not honoured.
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    context_management: Any = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`POST /v1/messages`.

    Attributes:
      max_tokens: most tokens of the answer.
      temperature, top_p, top_k: absent, the model's generation defaults decide.
      service_tier: `auto` or `standard_only`: there is no difference.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    cache_control: Any = None
    # Known, not honoured.
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_UNHONOURED = (
    "tools",
    "tool_choice",
    "thinking",
    "mcp_servers",
    "output_format",
    "context_management",
    "container",
    "inference_geo",
    "speed",
    "diagnostics",
)


def prepare_message(
    data: bytes, prepare_chat: Callable[[ChatCompletionBody], PreparedRequest]
) -> PreparedRequest:
    """Decode and check a body, and have the chat that it asks for prepared. Raises: InvalidRequestError, ApiError."""
    body = decode(data, MessagesBody)
    refuse_unhonoured(body, _UNHONOURED, _NEUTRAL)
    if body.service_tier not in (None, "auto", "standard_only"):
        raise InvalidRequestError("service_tier must be 'auto' or 'standard_only'", param="service_tier")
    if body.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {body.max_tokens}", param="max_tokens")
    chat = _chat(body)
    chat.max_completion_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.response_format = _response_format(body.output_config)
    chat.user = None if body.metadata is None else body.metadata.user_id
    with renamed_params(_NAMES):
        prepared = prepare_chat(chat)
    return replace(
        prepared, endpoint="/v1/messages", response_id="msg_" + prepared.response_id.removeprefix("chatcmpl-")
    )


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None:
        return None
    if config.effort is not None:
        raise unsupported("output_config.effort", "'output_config.effort' is not supported by this server")
    if config.format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=config.format.schema))


class TokenCount(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


def count_tokens(data: bytes, context: ServingContext) -> TokenCount:
    """How many tokens the prompt of such a message has. Raises: InvalidRequestError, ApiError."""
    body = decode(data, CountTokensBody)
    refuse_unhonoured(body, _UNHONOURED, _NEUTRAL)
    context.check_model(body.model)
    with renamed_params(_NAMES):
        tokens = encode_conversation(
            _chat(body), context.tokenizer, context.max_model_len, tools=None, tool_format=context.tool_format
        )
    return TokenCount(input_tokens=len(tokens))


def _chat(body: CountTokensBody) -> ChatCompletionBody:
    messages = []
    if body.system is not None:
        messages.append(ChatMessage(role="system", content=_text("system", body.system)))
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant"):
            raise InvalidRequestError(
                f"{where}.role must be 'user' or 'assistant', got {message.role[:40]!r}",
                param=f"{where}.role",
            )
        messages.append(ChatMessage(role=message.role, content=_text(f"{where}.content", message.content)))
    if not body.messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return ChatCompletionBody(
        model=body.model,
        messages=messages,
        continue_final_message=body.messages[-1].role == "assistant" or None,
    )


def _text(where: str, content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequestError(f"{where} must not be an empty list", param=where)
    texts = []
    for index, block in enumerate(content):
        path = f"{where}[{index}]"
        if block.type != "text":
            raise unsupported(f"{path}.type", f"{path}: only blocks of the type 'text' are supported")
        if block.text is None:
            raise InvalidRequestError(f"{path}.text is missing", param=f"{path}.text")
        for name in block.__struct_fields__:
            value = getattr(block, name)
            if name not in ("type", "text", "cache_control") and value not in (None, []):
                raise unsupported(f"{path}.{name}", f"'{path}.{name}' is not supported by this server")
        texts.append(block.text)
    return "\n".join(texts)
