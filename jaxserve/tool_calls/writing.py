"""Calls as models of a family write them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxserve.tool_calls.tool_format import ListUse, ToolFormat


def write_calls(tool_format: ToolFormat, calls: Sequence[tuple[str, str]]) -> str:
    """The text of an output that consists of these calls: names, and arguments as JSON."""
    objects = [
        f'{{"name": {json.dumps(name)}, "{tool_format.arguments_key}": {arguments}}}'
        for name, arguments in calls
    ]
    if tool_format.begins_bare:
        return tool_format.between.join(objects)
    if tool_format.lists is not ListUse.NEVER:
        return _framed(tool_format, f"[{tool_format.between.join(objects)}]")
    return tool_format.between.join(_framed(tool_format, text) for text in objects)


def _framed(tool_format: ToolFormat, text: str) -> str:
    padding = tool_format.padding
    return (
        tool_format.opening + padding + text + (padding + tool_format.closing if tool_format.closing else "")
    )
