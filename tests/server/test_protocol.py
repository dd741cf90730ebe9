from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import error_body, to_api_error
from jaxserve.server.protocol import decode_chat, decode_completion

DECODERS = (decode_completion, decode_chat)

MALFORMED = [
    b'{"model":',
    b"{,}",
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"model": "\xff"}',
    b"\xef\xbb\xbf{}",
    b"[" * 10_000_000,
    b'{"metadata": ' + b'{"a":' * 100_000,
    b'{"model": "a"} {"model": "b"}',
]

SURROGATES = [
    rb'{"model": "\ud800"}',
    rb'{"user": "x \ud83d y"}',
    rb'{"stop": ["\ude00"]}',
    rb'{"\ud800": 1}',
    rb'{"metadata": {"\udfff": "a"}}',
    rb'{"messages": [{"role": "\ud800", "content": "a"}]}',
    rb'{"messages": [{"role": "user", "content": "x \ud83d y"}]}',
]

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["n", "max_tokens", "top_k", "seed", "min_tokens", "prompt_logprobs", "priority"]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("data", MALFORMED + SURROGATES, ids=range(len(MALFORMED + SURROGATES)))
def test_malformed_bodies_are_refused_in_one_line_that_can_be_encoded(decode: Any, data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data)
    error = to_api_error(caught.value)
    assert error.status == 400
    assert "\n" not in error.message
    assert json.loads(error_body(error))["error"]["message"]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", '"nan"', '"5"', "true", "[]", "{}"]
)
def test_only_finite_numbers_are_numbers(decode: Any, field: str, value: str) -> None:
    with pytest.raises(InvalidRequestError):
        decode(f'{{"{field}": {value}}}'.encode())
    with pytest.raises(InvalidRequestError):
        decode(f'{{"logit_bias": {{"5": {value}}}}}'.encode())


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("field", INTEGERS)
def test_a_fraction_is_no_integer(decode: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(f'{{"{field}": 1.5}}'.encode())
    assert caught.value.param == field


@pytest.mark.parametrize("decode", DECODERS)
def test_an_unknown_field_is_refused_by_name(decode: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(b'{"model": "a", "foo": 1}')
    assert caught.value.param == "foo"
    assert "foo" in str(caught.value)


def test_a_fault_inside_a_list_names_the_list() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_completion(b'{"stop": ["a", 1]}')
    assert caught.value.param == "stop"
    with pytest.raises(InvalidRequestError) as caught:
        decode_chat(b'{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}')
    assert caught.value.param == "messages[1].role"


UNHONOURED: list[tuple[str, Any]] = [
    ("functions", [{}]),
    ("function_call", {"name": "f"}),
    ("audio", {}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content"}),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("store", True),
    ("best_of", 3),
]


@pytest.mark.parametrize(("field", "value"), UNHONOURED)
def test_what_is_not_honoured_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_chat(json.dumps({field: value}).encode())
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


NEUTRAL: list[tuple[str, Any]] = [
    *((field, None) for field, _ in UNHONOURED),
    ("tools", []),
    ("tool_choice", "none"),
    ("modalities", ["text"]),
    ("store", False),
    ("reasoning_effort", "none"),
    ("verbosity", "medium"),
    ("best_of", 1),
    ("user", "someone"),
    ("metadata", {"a": "b"}),
]


@pytest.mark.parametrize(("field", "value"), NEUTRAL)
def test_what_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    decode_chat(json.dumps({field: value}).encode())


def test_best_of_may_repeat_n() -> None:
    decode_completion(b'{"n": 3, "best_of": 3}')
    with pytest.raises(InvalidRequestError):
        decode_completion(b'{"n": 3, "best_of": 1000000}')


def test_completions_refuse_a_suffix() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_completion(b'{"suffix": "x"}')
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("decode", DECODERS)
def test_stream_options_need_a_stream(decode: Any) -> None:
    for options in ({}, {"include_usage": True}):
        with pytest.raises(InvalidRequestError) as caught:
            decode(json.dumps({"stream_options": options}).encode())
        assert caught.value.param == "stream_options"
    decode(b'{"stream_options": null}')
    with pytest.raises(InvalidRequestError):
        decode(b'{"stream": true, "stream_options": {"include_usage": "yes"}}')
    with pytest.raises(InvalidRequestError):
        decode(b'{"stream": true, "stream_options": {"continuous_usage_stats": true}}')


@pytest.mark.parametrize("decode", DECODERS)
def test_null_is_absent(decode: Any) -> None:
    absent = decode(b"{}")
    fields = json.dumps(dict.fromkeys(absent.__struct_fields__)).encode()
    assert decode(fields) == absent


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from(
    [*decode_completion(b"{}").__struct_fields__, *decode_chat(b"{}").__struct_fields__]
)


@given(st.dictionaries(FIELD_NAMES | st.text(), JSON_VALUES, max_size=4))
def test_no_body_does_anything_but_decode_or_be_refused(body: dict[str, Any]) -> None:
    for decode in DECODERS:
        try:
            decode(json.dumps(body).encode("utf-8", "surrogatepass"))
        except InvalidRequestError as error:
            error_body(to_api_error(error))


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(data)
        except InvalidRequestError as error:
            error_body(to_api_error(error))
