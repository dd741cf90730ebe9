"""What an output must look like."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096


class GrammarKind(enum.StrEnum):
    """What the text of a `Grammar` is."""

    JSON_SCHEMA = "json_schema"  # the output is a JSON value that the schema allows
    REGEX = "regex"  # ... is a match, as a whole (syntax of Rust's regex crate, but \d is 0-9)
    CHOICE = "choice"  # ... is one of the strings of a JSON array
    LARK = "lark"  # ... follows from `start` (llguidance's dialect of Lark)


@dataclass(frozen=True, slots=True)
class Grammar:
    """All that an output may be. Whether the text is a valid one is checked when it is compiled.

    Attributes:
      text: its source, at most MAX_GRAMMAR_CHARS.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", GrammarKind(self.kind))
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"a grammar may have {MAX_GRAMMAR_CHARS} characters, this one has {len(self.text)}",
                param="grammar",
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("a grammar has an unpaired surrogate", param="grammar") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON values that a schema (draft 2020-12, as far as llguidance knows it) allows."""
        try:
            return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
        except RecursionError:
            raise InvalidRequestError("the JSON schema is nested too deeply", param="grammar") from None

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of some strings.

        Raises:
          InvalidRequestError: there are none, or too many, or one is empty.
        """
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidRequestError(
                f"choice must hold 1 to {MAX_CHOICES} strings, none of them empty", param="choice"
            )
        return cls(GrammarKind.CHOICE, json.dumps(list(choices), ensure_ascii=False))
