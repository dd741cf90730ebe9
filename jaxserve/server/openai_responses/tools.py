"""Tools of `POST /v1/responses`, and the chat's that they mean."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.server.protocol import FunctionDefinition, NamedFunction, NamedToolChoice, Tool


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call; see `jaxserve.server.protocol.FunctionDefinition`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """That function, and no other, is to be called."""

    type: Literal["function"]
    name: str


Choice = Literal["none", "auto", "required"] | FunctionChoice


def chat_tools(tools: list[FunctionTool] | None) -> list[Tool] | None:
    """The same tools of a chat."""
    if tools is None:
        return None
    return [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def chat_choice(choice: Choice | None) -> Literal["none", "auto", "required"] | NamedToolChoice | None:
    """The same choice of a chat."""
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def tool_params(tools: list[FunctionTool] | None) -> dict[str, str]:
    """What is called what here, by the names of chats."""
    names = {"tool_choice.function.name": "tool_choice.name"}
    for index in range(len(tools or ())):
        for name in ("name", "parameters"):
            names[f"tools[{index}].function.{name}"] = f"tools[{index}].{name}"
    return names
