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
from jaxserve.server.anthropic.tools import Choice, ClientTool, chat_choice, chat_tools, tool_params
from jaxserve.server.anthropic.turns import ContentBlock, InputMessage, chat_messages, text_of
from jaxserve.server.chat_prompt import encode_conversation
from jaxserve.server.errors import renamed_params, unsupported
from jaxserve.server.protocol import ChatCompletionBody, ChatMessage, decode, refuse_unhonoured
from jaxserve.server.response_format import JsonSchemaFormat, ResponseFormat
from jaxserve.server.tool_use import check_tool_choice, check_tools

if TYPE_CHECKING:
    from jaxserve.server.conversion import PreparedRequest, ServingContext

# What the chat calls its fields, and what they are called here.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format.json_schema.schema": "output_config.format.schema",
}


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
      tools, tool_choice: what the model may, or has to, call.
    """

    model: str
    messages: list[InputMessage]
    system: str | list[ContentBlock] | None = None
    output_config: OutputConfig | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Choice | None = None
    # Known, not honoured.
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
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_UNHONOURED = (
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
    with renamed_params(_NAMES | tool_params(body.tools)):
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
    chat = _chat(body)
    with renamed_params(_NAMES | tool_params(body.tools)):
        check_tools(chat.tools, context.tool_format)
        check_tool_choice(chat.tool_choice, chat.tools)
        tokens = encode_conversation(
            chat,
            context.tokenizer,
            context.max_model_len,
            tools=None if chat.tool_choice == "none" else chat.tools,
            tool_format=context.tool_format,
        )
    return TokenCount(input_tokens=len(tokens))


def _chat(body: CountTokensBody) -> ChatCompletionBody:
    messages = []
    if body.system is not None:
        messages.append(ChatMessage(role="system", content=text_of("system", body.system)))
    for index, message in enumerate(body.messages):
        messages += chat_messages(f"messages[{index}]", message)
    if not body.messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    if messages[-1].tool_calls:
        raise InvalidRequestError("the last message uses a tool; its result is missing", param="messages")
    choice = body.tool_choice
    return ChatCompletionBody(
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant" or None,
        tools=chat_tools(body.tools),
        tool_choice=chat_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )
