"""Grammars of every kind, good and bad: a bad one is an error with a reason, at once, and harms none that follows."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from jaxserve.structured_output.compiler import GrammarCompiler
from tests.text_models import smollm2

VOCAB, EOS = 49152, 2


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD = {
    "regex: open group": Grammar(GrammarKind.REGEX, "("),
    "regex: open class": Grammar(GrammarKind.REGEX, "[a-"),
    "regex: a backslash and nothing": Grammar(GrammarKind.REGEX, "\\"),
    "regex: a backslash at the end": Grammar(GrammarKind.REGEX, r"a\\b" + "\\"),
    "regex: nothing fits": Grammar(GrammarKind.REGEX, r"[^\s\S]"),
    "regex: look-behind": Grammar(GrammarKind.REGEX, "(?<=x)y"),
    "regex: a million states": Grammar(GrammarKind.REGEX, "a{1000}{1000}"),
    "schema: no JSON": Grammar(GrammarKind.JSON_SCHEMA, "{"),
    "schema: a list": Grammar(GrammarKind.JSON_SCHEMA, "[]"),
    "schema: unknown type": Grammar.json_schema({"type": "thing"}),
    "schema: unknown keyword": Grammar.json_schema({"not": {"type": "string"}}),
    "schema: nothing fits": Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "schema: a remote reference": Grammar.json_schema({"$ref": "http://example.com/x"}),
    "schema: 30,000 deep": Grammar(GrammarKind.JSON_SCHEMA, '{"not":' * 30_000),
    "schema: a format that is defined, and not known": Grammar.json_schema(
        {"type": "string", "format": "iri"}
    ),
    "schema: 200 deep": Grammar.json_schema(nested(200)),
    "lark: no start": Grammar(GrammarKind.LARK, 'a: "b"'),
    "lark: unknown rule": Grammar(GrammarKind.LARK, "start: other"),
    "lark: empty": Grammar(GrammarKind.LARK, ""),
    "choice: bytes that the vocabulary has no token for": Grammar.choice(["\U00040000"]),
}
HEAVY = {
    "regex: many characters": Grammar(GrammarKind.REGEX, r"\p{L}{1,100000}"),
    "regex: nested repeats": Grammar(GrammarKind.REGEX, "((a+)+)+b"),
    "schema: 50 deep": Grammar.json_schema(nested(50)),
    "schema: an enum of 10,000": Grammar.json_schema({"enum": [f"text {i}" for i in range(10_000)]}),
    "schema: 500 alternatives": Grammar.json_schema(
        {"anyOf": [{"type": "object", "required": [f"p{i}"]} for i in range(500)]}
    ),
    "schema: itself": Grammar.json_schema({"$ref": "#"}),
}
GOOD = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(smollm2(), VOCAB, [EOS])


def is_spelt(text: str) -> bool:
    """Whether the vocabulary has tokens for all bytes of a text; SmolLM2's has none for some."""
    tokens = smollm2().encode(text, add_special_tokens=False, parse_special=False)
    return smollm2().decode(tokens, skip_special_tokens=False) == text


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a whole text is an output, token by token."""
    tokens = smollm2().encode(text, add_special_tokens=False, parse_special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_say_why_again_and_again(compiler: GrammarCompiler, name: str) -> None:
    """B160, B161."""
    reasons = []
    for _ in range(2):
        assert accepts(compiler.compile(GOOD), '{"a": 7}')
        started = time.monotonic()
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(BAD[name])
        assert time.monotonic() - started < 20  # a hang, not a figure
        assert caught.value.param == "grammar"
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]
    assert "\n" not in reasons[0]
    assert len(reasons[0]) < 400
    assert not reasons[0].startswith("the lark"), "the field is called grammar"
    assert "NoExtensionBias" not in reasons[0]  # llguidance's word for it tells nobody anything


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_grammars_are_served_or_refused_while_others_go_on(
    compiler: GrammarCompiler, name: str
) -> None:
    """B162: whatever it takes, the interpreter lock is not kept meanwhile."""
    done = threading.Event()

    def compile_it() -> None:
        try:
            compiler.compile(HEAVY[name]).compute_bitmask()
        except InvalidRequestError:
            pass
        finally:
            done.set()

    thread = threading.Thread(target=compile_it)
    thread.start()
    longest, before = 0.0, time.monotonic()
    while not done.wait(0.001):
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    thread.join()
    assert longest < 5  # seconds in which this thread did not run


def test_too_much_to_compile_is_refused_before() -> None:
    with pytest.raises(InvalidRequestError, match="characters"):
        Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARS + 1))
    for choices in ([], [""], ["a", ""], ["x"] * (MAX_CHOICES + 1)):
        with pytest.raises(InvalidRequestError, match="choice"):
            Grammar.choice(choices)
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="deep"):
        Grammar.json_schema(schema)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        Grammar(GrammarKind.REGEX, "\ud800")


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(is_spelt)


@given(st.lists(ANY_TEXT, min_size=1, max_size=4))
def test_a_choice_is_one_of_them_to_the_letter(choices: list[str]) -> None:
    compiler = _shared()
    for text in choices:
        assert accepts(compiler.compile(Grammar.choice(choices)), text)
    other = "".join(choices) + "!"
    if other not in choices:
        assert not accepts(compiler.compile(Grammar.choice(choices)), other)


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5).filter(is_spelt)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", max_size=3), JSON, max_size=3), st.sampled_from([None, 2]))
def test_every_object_is_one(value: dict, indent: int | None) -> None:
    matcher = _shared().compile(Grammar.json_object())
    assert accepts(matcher, json.dumps(value, ensure_ascii=False, indent=indent))


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"\d{3}", "123", "\u0661\u0662\u0663"),
        ("a/b", "a/b", "a"),
        ("[^\n]+", "x y", "x\ny"),
        (r"\w+@\w+\.com", "me@there.com", "me@there.org"),
        ("(yes|no)?", "", "maybe"),
    ],
)
def test_regular_expressions_match_as_a_whole(
    compiler: GrammarCompiler, pattern: str, fits: str, does_not: str
) -> None:
    grammar = Grammar(GrammarKind.REGEX, pattern)
    assert accepts(compiler.compile(grammar), fits)
    assert not accepts(compiler.compile(grammar), does_not)


def test_matchers_do_not_share_their_places(compiler: GrammarCompiler) -> None:
    grammar = Grammar.choice(["ab", "cd"])
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    before = second.compute_bitmask()
    first.consume_token(smollm2().encode("a", add_special_tokens=False)[0])
    assert second.compute_bitmask() == before
    assert first.compute_bitmask() != before
    assert compiler.compile(grammar).compute_bitmask() == before


def test_control_tokens_come_from_no_text(compiler: GrammarCompiler) -> None:
    """A string may hold "<|im_end|>" as characters; the token itself is only the grammar's end."""
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, r"(.|\n)*"))
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    specials = smollm2().special_token_ids
    assert [token for token in sorted(specials) if allowed[token]] == [EOS]


def test_a_model_without_an_end_has_none() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(smollm2(), VOCAB, []).compile(GOOD)


_SHARED: list[GrammarCompiler] = []


def _shared() -> GrammarCompiler:
    if not _SHARED:
        _SHARED.append(GrammarCompiler(smollm2(), VOCAB, [EOS]))
    return _SHARED[0]


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        ({"type": "string", "format": "path"}, '"a/b"', "1"),
        ({"anyOf": [{"type": "string", "format": "binary"}, {"type": "null"}]}, "null", "1"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]", '["a"]'),
        (
            {"properties": {"x": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"type": "string", "format": "zip"}}},
            "{}",
            "{1",
        ),
        # No keywords, but names and values.
        (
            {"properties": {"format": {"type": "integer"}}, "required": ["format"]},
            '{"format":1}',
            '{"format":"path"}',
        ),
        ({"const": {"format": "path", "uniqueItems": False}}, '{"format":"path","uniqueItems":false}', "{}"),
    ],
)
def test_what_asks_for_nothing_is_left_out(
    compiler: GrammarCompiler, schema: dict, takes: str, refuses: str
) -> None:
    grammar = Grammar.json_schema(schema)
    assert accepts(compiler.compile(grammar), takes)
    assert not accepts(compiler.compile(grammar), refuses)


def test_white_space_between_the_parts_of_json_ends(compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    for text in ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{\r\n\t"a": 1\r\n}'):
        assert accepts(compiler.compile(grammar), text)
    for text in ('{\n\n"a":1}', '{"a":  1}', '{ \n"a":1}'):
        assert not accepts(compiler.compile(grammar), text)
