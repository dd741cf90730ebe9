"""What a JSON Schema says without asking for anything, and what llguidance would refuse nevertheless."""

from __future__ import annotations

import json
from typing import Any

# The formats that JSON Schema defines (draft 2020-12, validation, section 7.3): any other is an annotation, such as
# pydantic's "path".
_FORMATS = frozenset(
    [
        *(
            "date-time",
            "date",
            "time",
            "duration",
            "email",
            "idn-email",
            "hostname",
            "idn-hostname",
            "ipv4",
            "ipv6",
        ),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    ]
)
_SCHEMA_KEYS = frozenset(
    [
        *(
            "additionalItems",
            "additionalProperties",
            "contains",
            "else",
            "if",
            "items",
            "not",
            "propertyNames",
        ),
        *("then", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
_LIST_KEYS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_MAP_KEYS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])


def without_annotations(schema: str) -> str:
    """A schema's text without formats that nobody has defined, and without `uniqueItems: false`.

    Raises:
      ValueError: it is no JSON.
    """
    return json.dumps(_asking(json.loads(schema)), ensure_ascii=False)


def _asking(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema  # true, false, or what llguidance will complain about
    return {key: _child(key, value) for key, value in schema.items() if _asks(key, value)}


def _asks(key: str, value: Any) -> bool:
    if key == "format":
        return not isinstance(value, str) or value in _FORMATS
    return not (key == "uniqueItems" and value is False)


def _child(key: str, value: Any) -> Any:
    if key in _LIST_KEYS and isinstance(value, list):
        return [_asking(each) for each in value]
    if key in _MAP_KEYS and isinstance(value, dict):
        return {name: _asking(each) for name, each in value.items()}
    return _asking(value) if key in _SCHEMA_KEYS else value
