"""Grammars of forced calls: what they let through is what parsers read, and fits the schemas."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.tool_calls.call_grammar import CallableFunction, call_grammar
from jaxserve.tool_calls.formats import FORMATS
from jaxserve.tool_calls.tool_format import ToolFormat
from jaxserve.tool_calls.writing import write_calls
from tests.tool_calls.families import family
from tests.tool_calls.reading import read

ALL = pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (
    CallableFunction("get_weather", WEATHER),
    CallableFunction("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
)
END = 2


@functools.cache
def compiler(tool_format: ToolFormat) -> GrammarCompiler:
    tokenizer = family(tool_format.name)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, (END,))


def grammar_of(tool_format: ToolFormat, functions: Any = FUNCTIONS, **kwargs: Any) -> Grammar:
    tokenizer = family(tool_format.name)
    ids = {mark: id_ for mark in tool_format.marks for id_ in tokenizer.special_ids_of((mark,))}
    return Grammar(GrammarKind.LARK, call_grammar(tool_format, functions, ids, **kwargs))


def accepts(tool_format: ToolFormat, text: str, **kwargs: Any) -> bool:
    """The text as this model would write it, and then an end."""
    matcher = compiler(tool_format).compile(grammar_of(tool_format, **kwargs))
    tokens = family(tool_format.name).encode(text, add_special_tokens=False)
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and matcher.is_accepting()
    )


@ALL
def test_calls_as_the_family_writes_them_and_nothing_else(tool_format: ToolFormat) -> None:
    one, other = ("get_weather", '{"city": "Oslo", "days": 3}'), ("get_time", "{}")
    for calls in ([one], [other], [one, other], [other, other, one]):
        assert accepts(tool_format, write_calls(tool_format, calls)), calls
        assert accepts(tool_format, write_calls(tool_format, calls), max_calls=1) == (len(calls) == 1)
    for name, arguments in (
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Paris"}'),
        ("get_weather", '{"city": "Oslo", "days": 9}'),
        ("get_weather", '{"city": "Oslo", "more": 1}'),
        ("get_time", '{"city": "Oslo"}'),
        ("get", "{}"),
    ):
        assert not accepts(tool_format, write_calls(tool_format, [(name, arguments)])), (name, arguments)
    for text in (
        "",
        "Hello",
        "Yes: " + write_calls(tool_format, [one]),
        write_calls(tool_format, [one]) + " ok",
    ):
        assert not accepts(tool_format, text)


@ALL
def test_whatever_is_drawn_is_a_call_that_fits(tool_format: ToolFormat) -> None:
    """A model without any sense: tokens at random among those that may come."""
    tokenizer, made = family(tool_format.name), compiler(tool_format)
    for seed in range(5):
        rng = random.Random(seed)
        matcher = made.compile(grammar_of(tool_format, max_calls=None if seed % 2 else 1))
        tokens: list[int] = []
        while not matcher.is_stopped() and len(tokens) < 400:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            [allowed] = np.unpackbits(mask, bitorder="little").nonzero()
            token = END if END in allowed else int(rng.choice(allowed.tolist()))
            matcher.consume_token(token)
            tokens.append(token)
        assert matcher.is_accepting()
        text = tokenizer.decode([one for one in tokens if one != END], skip_special_tokens=False)
        result = read(tool_format, text, names=("get_weather", "get_time"))
        assert result.content == ""
        assert result.calls
        assert not result.broken
        for _, name, arguments in result.calls:
            values = json.loads(arguments)
            if name == "get_weather":
                assert values.pop("city") in ("Oslo", "Rome")
                assert 1 <= values.pop("days", 1) <= 5
            assert not values


def test_schemas_that_refer_to_themselves_and_that_leave_everything_open() -> None:
    tool_format = FORMATS["smollm2"]
    tree = {
        "$defs": {"t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}},
        "$ref": "#/$defs/t",
    }
    for parameters, arguments in ((tree, '{"next": {"next": {}}}'), ({}, '{"a": [1, null, "b"]}')):
        functions = [CallableFunction("f", parameters)]
        assert accepts(tool_format, write_calls(tool_format, [("f", arguments)]), functions=functions)


def test_what_can_not_be_enforced_is_refused_unless_it_may_be_ignored() -> None:
    tool_format = FORMATS["hermes"]
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(InvalidRequestError):
        compiler(tool_format).compile(grammar_of(tool_format, [CallableFunction("f", parameters)]))
    lenient = [CallableFunction("f", parameters, is_lenient=True)]
    assert accepts(tool_format, write_calls(tool_format, [("f", '{"a": [1, 1]}')]), functions=lenient)
