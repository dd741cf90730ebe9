"""Text and conversations to token ids, checked: the one way for every endpoint that takes either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import unsupported
from jaxserve.server.protocol import ChatMessage, Tool, ToolCall
from jaxserve.server.tool_use import template_tools
from jaxserve.tool_calls.plain_prompt import plain_messages
from jaxserve.tool_calls.tool_format import ToolFormat

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
)


class Conversation(Protocol):
    """The fields of a body that become a prompt by way of the chat template; see `ChatCompletionBody`."""

    @property
    def messages(self) -> list[ChatMessage] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def encode_text(
    text: str, tokenizer: Tokenizer, max_model_len: int, *, param: str = "prompt", add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a text. Special tokens in it count as such.

    Args:
      param: what the client calls it.

    Raises:
      InvalidRequestError: it can't possibly fit, or has no UTF-8 form.
    """
    _check_chars(len(text), tokenizer, max_model_len, param=param)
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def encode_conversation(
    body: Conversation,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    tools: Sequence[Tool] | None,
    tool_format: ToolFormat | None,
) -> tuple[int, ...]:
    """Token ids of `body.messages`, through the model's chat template.

    Args:
      tools: what the model is told that it may call. Where the template knows nothing of tools, they and calls are put
        into the messages' text.
      tool_format: how it writes calls, if that is known.

    Raises:
      InvalidRequestError: no template, a message of a wrong form, or the template refuses them.
    """
    if not tokenizer.has_chat_template:
        raise InvalidRequestError(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    if not body.messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    messages = [_template_message(index, message) for index, message in enumerate(body.messages)]
    offered = template_tools(tools)
    if not tokenizer.template_knows_tools:
        messages = _in_plain_text(messages, offered, tool_format)
        offered = []
    num_chars = sum(len(message["content"]) for message in messages)
    _check_chars(num_chars, tokenizer, max_model_len, param="messages")
    if offered:
        num_chars = len(msgspec.json.encode(offered).decode())
        _check_chars(num_chars, tokenizer, max_model_len, param="tools")
    goes_on = bool(body.continue_final_message)
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and add_prompt:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' can't both be true",
            param="continue_final_message",
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "'continue_final_message' needs a last message with the role 'assistant'",
            param="continue_final_message",
        )
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED_TEMPLATE_NAMES:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs"
            )
    return tuple(
        tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_prompt,
            continue_final_message=goes_on,
            tools=offered,
            template_kwargs=kwargs,
        )
    )


def _check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int, *, param: str) -> None:
    """Refuse a text that can't possibly fit before time is spent on tokenising it."""
    limit = tokenizer.max_chars_for(max_model_len)
    if num_chars > limit:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters, more than {limit}, the most that "
            f"{max_model_len} tokens (the longest prompt and output together) can hold",
            param=param,
            code="context_length_exceeded",
        )


def _in_plain_text(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], tool_format: ToolFormat | None
) -> list[dict[str, Any]]:
    if tool_format is not None:
        return plain_messages(messages, tools, tool_format)
    for index, message in enumerate(messages):
        if message["role"] == "tool" or "tool_calls" in message:
            raise unsupported(
                f"messages[{index}]", f"messages[{index}]: this model's chat template knows nothing of tools"
            )
    return messages


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:40]!r}",
            param=f"{where}.role",
        )
    for name in ("refusal", "annotations", "audio", "function_call"):
        if getattr(message, name) not in (None, []):
            raise unsupported(f"{where}.{name}", f"'{where}.{name}' is not supported by this server")
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(
            f"{where}.tool_calls is for messages of the role 'assistant'", param=f"{where}.tool_calls"
        )
    if (role == "tool") != bool(message.tool_call_id):
        raise InvalidRequestError(
            f"{where}.tool_call_id must be there for the role 'tool', and for no other",
            param=f"{where}.tool_call_id",
        )
    needs_none = bool(message.tool_calls) and message.content in (None, [])
    content = "" if needs_none else _content_text(f"{where}.content", message.content)
    result: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        result["tool_calls"] = [
            _template_call(f"{where}.tool_calls[{number}]", call)
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def _template_call(where: str, call: ToolCall) -> dict[str, Any]:
    """With the arguments as an object, which most templates want."""
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequestError(f"{param} must be the text of a JSON object", param=param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _content_text(where: str, content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(f"{where} must be a text, got null or nothing", param=where)
    if not content:
        raise InvalidRequestError(f"{where} must not be an empty list", param=where)
    texts = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise unsupported(
                f"{where}[{index}].type", f"{where}[{index}]: only parts of the type 'text' are supported"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{index}].text must be a text", param=f"{where}[{index}].text")
        for name in part:
            if name not in ("type", "text"):
                raise InvalidRequestError(
                    f"unknown field '{where}[{index}].{name}'",
                    param=f"{where}[{index}].{name}",
                    code="unknown_field",
                )
        texts.append(text)
    return "\n".join(texts)
