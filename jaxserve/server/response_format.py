"""What a client says of the form of an answer -> its grammar."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.server.errors import renamed_params


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema with its name. Answers always keep to it, with or without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format` of the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`: one of the following.

    Attributes:
      json: a JSON Schema, or one as text.
      json_object: any JSON object.
      regex: a regular expression that the answer matches as a whole.
      choice: the answer is one of these.
      grammar: a Lark grammar, in llguidance's dialect; the answer follows from `start`.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def read_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[Grammar | None, str]:
    """(the grammar that an answer has to keep to, the name of the field that asks for it).

    Raises:
      InvalidRequestError: more than one is asked for, or none where one is announced.
    """
    formatted, where = _of_response_format(response_format)
    other, other_where = _of_structured_outputs(structured)
    if formatted is not None and other is not None:
        raise InvalidRequestError(
            "'response_format' and 'structured_outputs' ask for two forms at once", param="structured_outputs"
        )
    return (other, other_where) if formatted is None else (formatted, where)


def _of_response_format(asked: ResponseFormat | None) -> tuple[Grammar | None, str]:
    where = "response_format.json_schema.schema"
    if asked is None:
        return None, where
    if asked.json_schema is not None and asked.type != "json_schema":
        raise InvalidRequestError(
            "'response_format.json_schema' needs the type 'json_schema'", param="response_format.type"
        )
    if asked.type == "text":
        return None, where
    if asked.type == "json_object":
        return Grammar.json_object(), "response_format"
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise InvalidRequestError(f"missing field '{where}'", param=where, code="missing_field")
    with renamed_params({"grammar": where}):
        return Grammar.json_schema(asked.json_schema.schema), where


def _of_structured_outputs(asked: StructuredOutputs | None) -> tuple[Grammar | None, str]:
    if asked is None:
        return None, "structured_outputs"
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequestError(
            f"'structured_outputs' must hold one of {', '.join(asked.__struct_fields__)}",
            param="structured_outputs",
        )
    where = f"structured_outputs.{given[0]}"
    with renamed_params({"grammar": where, "choice": where}):
        if asked.choice is not None:
            return Grammar.choice(asked.choice), where
        if asked.regex is not None:
            return Grammar(GrammarKind.REGEX, asked.regex), where
        if asked.grammar is not None:
            return Grammar(GrammarKind.LARK, asked.grammar), where
        if isinstance(asked.json, str):
            return Grammar(GrammarKind.JSON_SCHEMA, asked.json), where
        if asked.json is not None:
            return Grammar.json_schema(asked.json), where
    return Grammar.json_object(), where
