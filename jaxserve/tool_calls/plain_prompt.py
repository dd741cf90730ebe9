"""Tools in the words of ordinary messages, for chat templates that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.tool_calls.tool_format import ToolFormat
from jaxserve.tool_calls.writing import write_calls


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """The same conversation in messages that have a role (system, user or assistant) and text alone.

    The system message begins by describing the tools, calls become the text that the model would have written, and
    results a user's message.

    Args:
      messages, tools: as chat templates take them; arguments of calls are objects.
    """
    plain = [_plain_message(message, tool_format) for message in messages]
    if not tools:
        return plain
    text = _description(tools, tool_format)
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = f"{text}\n\n{plain[0]['content']}"
        return plain
    return [{"role": "system", "content": text}, *plain]


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    example = write_calls(tool_format, [("function_name", '{"argument_name": "value"}')])
    return (
        "You can call functions to answer. These are available, each with a JSON schema of its arguments:\n"
        f"<tools>{_dumped(tools)}</tools>\n"
        "To call one or several, write nothing but the calls, exactly in this form:\n"
        f"{example}\n"
        "Give every argument the type that the schema asks for. If no function helps, answer in words. If something "
        "that a function needs is missing, ask for it."
    )


def _plain_message(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if calls:
        functions = [call["function"] for call in calls]
        text = write_calls(tool_format, [(one["name"], _dumped(one["arguments"])) for one in functions])
        content = f"{content}\n{text}" if content else text
    return {key: value for key, value in message.items() if key in ("role", "name")} | {"content": content}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
