"""Parsers driven as servers drive them, and outputs as models write them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.tool_calls.parser import ToolCallParser
from jaxserve.tool_calls.tool_format import ListUse, ToolFormat

NAMES = ("get_weather", "get", "f-1")


@dataclass
class Read:
    """What deltas add up to."""

    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    broken: bool = False


def read(tool_format: ToolFormat, pieces: Iterable[str], names: Sequence[str] = NAMES, **kwargs: Any) -> Read:
    """All of an output that comes in these pieces; checks the order of the deltas on the way."""
    numbers = itertools.count()
    parser = ToolCallParser(tool_format, names, lambda: f"id{next(numbers)}", **kwargs)
    result = Read()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        result.content += parsed.content
        for delta in parsed.calls:
            if delta.name is None:
                assert delta.id is None
                assert delta.index == len(result.calls) - 1, "deltas of a call that is not the latest"
                id_, name, arguments = result.calls[-1]
                result.calls[-1] = (id_, name, arguments + delta.arguments)
            else:
                assert delta.id is not None
                assert delta.index == len(result.calls), "calls begin in order, each once"
                result.calls.append((delta.id, delta.name, delta.arguments))
    result.broken = parser.has_broken_call
    return result


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, str]], blank: str = "") -> str:
    """Calls (name, arguments) as a model of that family writes them, with `blank` wherever white space may be."""
    objects = [
        f'{{{blank}"name":{blank}"{name}",{blank}"{tool_format.arguments_key}":{blank}{arguments}{blank}}}'
        for name, arguments in calls
    ]
    opening, closing = tool_format.opening + blank, blank + tool_format.closing
    if tool_format.lists is not ListUse.NEVER:
        return f"{opening}[{blank}{f'{blank},{blank}'.join(objects)}{blank}]{closing}"
    if tool_format.begins_bare:
        return f"{blank};{blank}".join(objects)
    return blank.join(opening + text + closing for text in objects)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
