"""The tools that a request offers: checked, as chat templates want them, and what of its answer is a call of them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.server.errors import renamed_params, unsupported
from jaxserve.server.protocol import NamedToolChoice, Tool
from jaxserve.tool_calls.call_grammar import CallableFunction, call_grammar
from jaxserve.tool_calls.deltas import ToolCallDelta
from jaxserve.tool_calls.formats import AUTO, choose_format
from jaxserve.tool_calls.parser import ToolCallParser
from jaxserve.tool_calls.tool_format import ToolFormat

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}", re.ASCII)
_ALPHANUMERIC = string.ascii_letters + string.digits

ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What of an answer is a tool call.

    Attributes:
      names: of the functions offered.
      max_calls: further calls of an answer are left out.
    """

    tool_format: ToolFormat
    names: tuple[str, ...]
    max_calls: int | None

    def parser(self) -> ToolCallParser:
        """For one choice."""
        return ToolCallParser(self.tool_format, self.names, self._new_id, max_calls=self.max_calls)

    def forced_calls(
        self, tools: Sequence[Tool], choice: ToolChoice | None, tokenizer: Tokenizer
    ) -> Grammar | None:
        """What an answer has to look like, where the choice leaves no other than to call.

        Raises:
          InvalidRequestError: it would be too large.
        """
        if choice is None or choice == "auto":
            return None
        is_named = isinstance(choice, NamedToolChoice)
        functions = [
            CallableFunction(
                function.name,
                NO_PARAMETERS if function.parameters is None else function.parameters,
                is_lenient=function.strict is False,
            )
            for function in (tool.function for tool in tools)
            if not isinstance(choice, NamedToolChoice) or function.name == choice.function.name
        ]
        mark_ids = {
            mark: token for mark in self.tool_format.marks for token in tokenizer.special_ids_of((mark,))
        }
        text = call_grammar(
            self.tool_format, functions, mark_ids, max_calls=1 if is_named else self.max_calls
        )
        with renamed_params({"grammar": "tools"}):
            return Grammar(GrammarKind.LARK, text)

    def _new_id(self) -> str:
        length = self.tool_format.call_id_length
        if length is not None:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"


def tool_format_of(tokenizer: Tokenizer, name: str = AUTO) -> ToolFormat | None:
    """The format in which a model writes calls; None: it is not known. See `choose_format`."""
    return choose_format(name, tokenizer.chat_template_source, tokenizer.special_texts)


def check_tools(tools: Sequence[Tool] | None, tool_format: ToolFormat | None) -> None:
    """Raises: InvalidRequestError: there are tools that can't be offered; `param` is what is at fault."""
    if not tools:
        return
    if tool_format is None:
        raise unsupported(
            "tools",
            "'tools' is not supported for this model: it is not known in which form it writes tool calls "
            "(the server's --tool-call-parser says so)",
        )
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools holds {len(tools)} tools, at most {MAX_TOOLS}", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}].function", tool.function
        if _NAME.fullmatch(function.name) is None:
            raise InvalidRequestError(
                f"{where}.name must be 1 to 128 letters, digits, '_' and '-', got {function.name[:40]!r}",
                param=f"{where}.name",
            )
        if function.name in seen:
            raise InvalidRequestError(
                f"{where}.name: there is another tool called {function.name!r}", param=f"{where}.name"
            )
        seen.add(function.name)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f"{where}.parameters must be a JSON schema of the type 'object', got {str(kind)[:40]!r}",
                param=f"{where}.parameters",
            )


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    """Raises: InvalidRequestError: it asks for a tool that is not there."""
    if choice is None or choice in ("none", "auto"):
        return
    if not tools:
        raise InvalidRequestError(
            "'tool_choice' asks for a tool, and there are no 'tools'", param="tool_choice"
        )
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if all(tool.function.name != name for tool in tools):
            raise InvalidRequestError(
                f"tool_choice names {name[:128]!r}, which is not among the tools",
                param="tool_choice.function.name",
            )


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools in the form that chat templates know."""
    return [_template_tool(tool) for tool in tools or ()]


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def call_json(delta: ToolCallDelta, *, in_stream: bool) -> dict[str, Any]:
    """A call, or what is new of it, in the shape of chats."""
    function = {} if delta.name is None else {"name": delta.name}
    return {
        **({"index": delta.index} if in_stream else {}),
        **({} if delta.id is None else {"id": delta.id, "type": "function"}),
        "function": {**function, "arguments": delta.arguments},
    }
