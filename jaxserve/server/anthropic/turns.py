"""Turns of `POST /v1/messages`, and the chat's messages that they mean."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import unsupported
from jaxserve.server.protocol import CalledFunction, ChatMessage, ToolCall


class ContentBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of text, a tool's use, or its result. `cache_control` is a hint that prefix caching here needs not.

    Attributes:
      type: `text`, `tool_use` (of an assistant) or `tool_result` (of a user).
      id, name, input: of a use; the input is an object.
      tool_use_id, content: whose result, and the result: a text, or text blocks.
      is_error: no effect: the result says what went wrong.
    """

    type: str
    text: str | None = None
    cache_control: Any = None
    citations: Any = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    # Of blocks of other types, which are refused by their type.
    source: Any = None
    thinking: Any = None
    signature: Any = None
    data: Any = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. An assistant's that is the last one is left open, and the answer goes on where it stops."""

    role: str
    content: str | list[ContentBlock]


_FIELDS = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}
_TYPES = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use")}


def chat_messages(where: str, message: InputMessage) -> list[ChatMessage]:
    """A turn as messages of a chat: results are messages of their own. Raises: InvalidRequestError."""
    if message.role not in _TYPES:
        raise InvalidRequestError(
            f"{where}.role must be 'user' or 'assistant', got {message.role[:40]!r}", param=f"{where}.role"
        )
    content, path = message.content, f"{where}.content"
    if isinstance(content, str) or not content:
        return [ChatMessage(role=message.role, content=text_of(path, content))]
    messages: list[ChatMessage] = []
    for index, block in enumerate(content):
        place = f"{path}[{index}]"
        _check_block(place, block, _TYPES[message.role])
        if block.type == "tool_result":
            result = (
                "" if block.content in (None, "", []) else text_of(f"{place}.content", block.content or "")
            )
            tool_use_id = _given(f"{place}.tool_use_id", block.tool_use_id)
            messages.append(ChatMessage(role="tool", tool_call_id=tool_use_id, content=result))
            continue
        if not messages or messages[-1].role != message.role:
            messages.append(ChatMessage(role=message.role))
        turn = messages[-1]
        if block.type == "tool_use":
            turn.tool_calls = [*(turn.tool_calls or ()), _call(place, block)]
        else:
            text = _given(f"{place}.text", block.text)
            turn.content = text if turn.content is None else f"{turn.content}\n{text}"
    return messages


def text_of(where: str, content: str | list[ContentBlock]) -> str:
    """Of content that may be nothing but text, its blocks joined by newlines. Raises: InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequestError(f"{where} must not be an empty list", param=where)
    texts = []
    for index, block in enumerate(content):
        _check_block(f"{where}[{index}]", block, ("text",))
        texts.append(_given(f"{where}[{index}].text", block.text))
    return "\n".join(texts)


def _check_block(where: str, block: ContentBlock, types: tuple[str, ...]) -> None:
    if block.type not in types:
        names = " and ".join(f"'{one}'" for one in types)
        raise unsupported(
            f"{where}.type", f"{where}.type: only blocks of the types {names} are supported here"
        )
    for name in block.__struct_fields__:
        known = name in _FIELDS[block.type] or name in ("type", "cache_control")
        if not known and getattr(block, name) not in (None, []):
            raise unsupported(f"{where}.{name}", f"'{where}.{name}' is not supported by this server")


def _call(where: str, block: ContentBlock) -> ToolCall:
    name = _given(f"{where}.name", block.name)
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(
        id=_given(f"{where}.id", block.id), function=CalledFunction(name=name, arguments=arguments)
    )


def _given(where: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{where} is missing", param=where)
    return value
