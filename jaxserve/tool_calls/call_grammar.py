"""Grammars of outputs that are nothing but calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.tool_calls.tool_format import ListUse, ToolFormat

# Arguments as templates print them, so that nothing but their content is left to choose.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that may be called.

    Attributes:
      parameters: a JSON schema of an object.
      is_lenient: parts of the schema that can't be enforced are ignored; otherwise the grammar is no valid one.
    """

    name: str
    parameters: Mapping[str, Any]
    is_lenient: bool = False


def call_grammar(
    tool_format: ToolFormat,
    functions: Sequence[CallableFunction],
    mark_ids: Mapping[str, int],
    *,
    max_calls: int | None = None,
) -> str:
    """A Lark grammar in llguidance's dialect: one call at least, just as models of the family write calls.

    Args:
      functions: those that may be called, at least one.
      mark_ids: ids of the frame's texts that are control tokens.
      max_calls: 1, or None for any number.
    """
    marks = {
        mark: f"<[{mark_ids[mark]}]>" if mark in mark_ids else json.dumps(mark) for mark in tool_format.marks
    }
    padding = [json.dumps(tool_format.padding)] if tool_format.padding else []
    opening = [marks[tool_format.opening], *padding]
    closing = [*padding, marks[tool_format.closing]] if tool_format.closing else []
    in_list = tool_format.lists is not ListUse.NEVER
    frame = ["call"] if in_list or tool_format.begins_bare else [*opening, "call", *closing]
    more = [f"({json.dumps(tool_format.between)} frame)*"] if max_calls != 1 else []
    start = [*opening, '"["', "frame", *more, '"]"', *closing] if in_list else ["frame", *more]
    rules = [
        f"start: {' '.join(start)}",
        f"frame: {' '.join(frame)}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
    ]
    for index, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{tool_format.arguments_key}": '
        schema = {
            "type": "object",
            **function.parameters,
            "x-guidance": {**_SPACING, **({"lenient": True} if function.is_lenient else {})},
        }
        rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"
