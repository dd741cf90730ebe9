"""What a piece of an output adds to its content and to its calls."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCallDelta:
    """What is new about one call.

    Attributes:
      index: of the call, from 0.
      id, name: with the call's first delta, else None.
      arguments: characters of its arguments, as the model wrote them.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedText:
    """What a piece of text has turned out to be. Texts joined, it is the same however the output was cut.

    Attributes:
      content: text outside of calls.
      calls: at most one delta a call.
    """

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
