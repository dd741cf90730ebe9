"""Outputs to content and calls, however they are cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tool_calls.formats import FORMATS
from jaxserve.tool_calls.hermes import HERMES
from jaxserve.tool_calls.llama3_json import LLAMA3_JSON
from jaxserve.tool_calls.mistral import MISTRAL
from jaxserve.tool_calls.smollm2 import SMOLLM2
from jaxserve.tool_calls.tool_format import ToolFormat
from tests.tool_calls.reading import NAMES, Read, dumped, read, written

ALL = pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)

# Pieces of frames, of objects, and of what may go wrong with them.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>", "</", "[", "]"),
    *('{"name": "get"', '{"name": "nobody"', '{"name": "f-1", "arguments": {}}', '{"name": "f-1"}', "{", "}"),
    *(
        ', "arguments": {',
        '"parameters": {',
        '{"arguments": {"a": 1}, "name": "get"}',
        ', "id": 7',
        "\\",
        '"',
    ),
    *(",", ";", ":", " ", "\n", "text", "é", "1", '"}{"', "null"),
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(FRAGMENTS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FRAGMENTS), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5) | st.sampled_from(FRAGMENTS), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS.map(dumped)), min_size=1, max_size=4)
BLANK = st.sampled_from(["", " ", "\n", "\n\t "])
TEXT = st.text("ab<[{|\n ", max_size=12)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """`text` in any pieces, empty ones included."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@ALL
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_how_an_output_is_cut_changes_nothing(tool_format: ToolFormat, data: st.DataObject) -> None:
    text = data.draw(OUTPUTS)
    whole = read(tool_format, [text])
    assert read(tool_format, text) == whole, "character by character"
    assert read(tool_format, cut(data.draw, text)) == whole


@ALL
@given(calls=CALLS, blank=BLANK, data=st.data())
@settings(max_examples=40, deadline=None)
def test_calls_come_back_as_they_were_written(
    tool_format: ToolFormat, calls: list[tuple[str, str]], blank: str, data: st.DataObject
) -> None:
    text = written(tool_format, calls, blank)
    expected = [(f"id{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
    assert read(tool_format, cut(data.draw, text)) == Read("", expected)
    before, after = data.draw(TEXT), data.draw(TEXT)
    if tool_format.begins_bare:
        text = tool_format.opening + text
    result = read(tool_format, cut(data.draw, before + text + after))
    assert result.calls[: len(calls)] == expected
    assert "".join(result.content.split()) == "".join((before + after).split())
    if before.strip():
        assert result.content.startswith(before)
    assert not result.broken


@ALL
@given(text=OUTPUTS | TEXT | st.text())
@settings(max_examples=50, deadline=None)
def test_what_is_no_call_loses_no_character(tool_format: ToolFormat, text: str) -> None:
    """With nothing that could be called, nothing is a call."""
    result = read(tool_format, [text], names=())
    assert not result.calls
    if result.content != text:  # then lists of no calls were left out, and white space around them
        assert tool_format in (SMOLLM2, MISTRAL)
        opening, closing = re.escape(tool_format.opening), re.escape(tool_format.closing)
        rest = re.sub(rf"{opening}\s*\[\s*\]\s*{closing}", "", text)
        assert rest != text
        assert "".join(result.content.split()) == "".join(rest.split())


MALFORMED = [
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "a function that was not offered"),
    (HERMES, '<tool_call>{"name": "get", "arguments": [1]}</tool_call>', "arguments that are no object"),
    (HERMES, '<tool_call>{"name": "get", "arguments": null}</tool_call>', "none at all"),
    (HERMES, '<tool_call>{"function": "get", "arguments": {}}</tool_call>', "another key"),
    (HERMES, "<tool_call>get(1)</tool_call>", "no object"),
    (HERMES, "<tool_call></tool_call>", "nothing"),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>', "no name"),
    (HERMES, '<tool_call>[{"name": "get", "arguments": {}}]</tool_call>', "a list, which the family has not"),
    (HERMES, '<tool_call>{"name": "get"', "broken off before the arguments"),
    (HERMES, "so: <tool_ca", "broken off in the opening"),
    (HERMES, "\n <tool_call> no", "white space before it"),
    (HERMES, 'no frame: {"name": "get", "arguments": {}}', "no frame"),
    (SMOLLM2, '<tool_call>[{"name": "nobody", "arguments": {}}]</tool_call>', "not offered"),
    (SMOLLM2, "<tool_call>[] and more", "an empty list that does not end"),
    (MISTRAL, '[TOOL_CALLS]{"name": "get", "arguments": {}}', "no list"),
    (MISTRAL, '[TOOL_CALLS] get{"a": 1}', "the form of later versions"),
    (LLAMA3_JSON, '{"city": "Oslo", "name": "get"}', "an answer in JSON"),
    (LLAMA3_JSON, '<|python_tag|>brave_search.call(query="x")', "a built-in tool"),
    (LLAMA3_JSON, 'Well: {"name": "get", "parameters": {}}', "behind text"),
]


@pytest.mark.parametrize(
    ("tool_format", "text"), [row[:2] for row in MALFORMED], ids=[f"{r[0].name}: {r[2]}" for r in MALFORMED]
)
def test_malformed_calls_stay_text(tool_format: ToolFormat, text: str) -> None:
    assert read(tool_format, [text]) == read(tool_format, text) == Read(text)


ODD: list[tuple[ToolFormat, str, Read]] = [
    # Beginnings of calls are calls, whatever follows.
    (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": "b',
        Read("", [("id0", "get", '{"a": "b')], True),
    ),
    (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": 1</tool_call>!',
        Read("!", [("id0", "get", '{"a": 1')], True),
    ),
    (HERMES, '<tool_call>{"name": "get", "arguments": {\'a\'}}', Read("", [("id0", "get", "{'a'}")])),
    # A frame that does not end, or not well.
    (HERMES, '<tool_call>{"name": "get", "arguments": {}}', Read("", [("id0", "get", "{}")])),
    (HERMES, '<tool_call>{"name": "get", "arguments": {}</tool_call>', Read("", [("id0", "get", "{}")])),
    (HERMES, '<tool_call>{"name": "get"}</tool_call> Yes.', Read(" Yes.", [("id0", "get", "{}")])),
    (
        HERMES,
        '<tool_call>{"name": "get"}\n<tool_call>{"name": "f-1"}',
        Read("", [("id0", "get", "{}"), ("id1", "f-1", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "get"} oh</tool_call>', Read(" oh</tool_call>", [("id0", "get", "{}")])),
    (HERMES, '<tool_call><tool_call>{"name": "get"}', Read("<tool_call>", [("id0", "get", "{}")])),
    (
        HERMES,
        '<tool_call>{"name": "<tool_call>{"name": "get"}',
        Read('<tool_call>{"name": "', [("id0", "get", "{}")]),
    ),
    # Further keys, and keys in another order.
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "x": [{"\\"}": 2}], "y": -1, "name": "get"}</tool_call>',
        Read("", [("id0", "get", '{"a": 1}')]),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get", "arguments": {}, "id": "123456789"}]',
        Read("", [("id0", "get", "{}")]),
    ),
    (
        LLAMA3_JSON,
        '\n<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}',
        Read("", [("id0", "get", '{"a": 1}')]),
    ),
    (LLAMA3_JSON, '{"name": "get", "arguments": {}}', Read("", [("id0", "get", "{}")])),
    # The smaller models leave the list out, and say with an empty one that they call nothing.
    (SMOLLM2, '<tool_call>{"name": "get", "arguments": {}}</tool_call>', Read("", [("id0", "get", "{}")])),
    (SMOLLM2, "<tool_call>[]</tool_call>", Read()),
    (SMOLLM2, "<tool_call>[ ]</tool_call>\nSorry.", Read("\nSorry.")),
    (
        SMOLLM2,
        '<tool_call>[{"name": "get"}, {"name": "nobody"}]</tool_call>',
        Read(', {"name": "nobody"}]</tool_call>', [("id0", "get", "{}")]),
    ),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), ODD, ids=lambda value: str(value)[:60])
def test_odd_outputs(tool_format: ToolFormat, text: str, expected: Read) -> None:
    assert read(tool_format, [text]) == read(tool_format, text) == expected


def test_deltas_come_as_early_as_they_are_certain() -> None:
    from jaxserve.tool_calls.parser import ToolCallParser

    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    assert parser.feed("Now <").content == "Now "
    assert parser.feed("b> ").content == "<b> "
    assert not parser.feed('<tool_call>{"name": "get"').calls
    [begin] = parser.feed(', "arguments": {').calls
    assert (begin.index, begin.id, begin.name, begin.arguments) == (0, "id", "get", "{")
    [more] = parser.feed('"a": "').calls
    assert (more.index, more.id, more.name, more.arguments) == (0, None, None, '"a": "')


@ALL
def test_calls_beyond_the_most_are_left_out(tool_format: ToolFormat) -> None:
    text = written(tool_format, [("get", '{"a": 1}'), ("f-1", "{}")]) + "\n"
    result = read(tool_format, text, max_calls=1)
    assert result == Read("", [("id0", "get", '{"a": 1}')])


def test_long_outputs_take_time_in_proportion() -> None:
    """Openings that lead nowhere, each with much behind it: reading again from each would take for ever."""
    text = '<tool_call>{"arguments": {"a": "' * 2_000
    assert read(HERMES, [text]) == Read(text)
    arguments = '{"a": ' + "[" * 20_000
    result = read(HERMES, ['<tool_call>{"name": "get", "arguments": ' + arguments])
    assert result == Read("", [("id0", "get", arguments)], broken=True)
