"""Tools of `POST /v1/messages`, and the chat's that they mean."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.protocol import FunctionDefinition, NamedFunction, NamedToolChoice, Tool


class ClientTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs; see `jaxserve.server.protocol.FunctionDefinition`.

    Attributes:
      input_schema: a JSON schema of an object.
      cache_control: has no effect.
    """

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class Choice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`any`: one tool at least has to be called; `tool`: the named one has to be."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def chat_tools(tools: list[ClientTool] | None) -> list[Tool] | None:
    """The same tools of a chat."""
    if tools is None:
        return None
    return [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def chat_choice(choice: Choice | None) -> Literal["none", "auto", "required"] | NamedToolChoice | None:
    """The same choice of a chat. Raises: InvalidRequestError: a name is missing, or is one too much."""
    if choice is None:
        return None
    if (choice.name is None) == (choice.type == "tool"):
        raise InvalidRequestError(
            "tool_choice.name must be there for the type 'tool', and for no other", param="tool_choice.name"
        )
    if choice.name is not None:
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


def tool_params(tools: list[ClientTool] | None) -> dict[str, str]:
    """What is called what here, by the names of chats."""
    names = {"tool_choice.function.name": "tool_choice.name"}
    for index in range(len(tools or ())):
        names[f"tools[{index}].function.name"] = f"tools[{index}].name"
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    return names
