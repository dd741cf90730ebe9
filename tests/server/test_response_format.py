"""What clients say of an answer's form, and what they are told when it can't be had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.server.protocol import decode_chat
from jaxserve.server.response_format import read_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields: Any) -> tuple[Grammar | None, str]:
    body = decode_chat(json.dumps(fields).encode())
    return read_grammar(body.response_format, body.structured_outputs)


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        Grammar.json_schema(SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        Grammar(GrammarKind.REGEX, "a"),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED)
def test_what_is_asked_for(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert read(**fields)[0] == grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "other": 1}}},
        "response_format.json_schema.other",
    ),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused_and_where(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.param == param
