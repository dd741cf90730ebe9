"""Which form a model writes calls in, and what templates make of tools and calls."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.chat_template import ChatTemplate
from jaxserve.cli.serve import ToolCallParserChoice
from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.errors import ConfigError
from jaxserve.tool_calls.formats import AUTO, FORMATS, NONE, choose_format
from jaxserve.tool_calls.plain_prompt import plain_messages
from jaxserve.tool_calls.writing import write_calls
from tests.tool_calls.families import LLAMA3_TEMPLATE, family, tool
from tests.tool_calls.reading import read

ALL = pytest.mark.parametrize("name", FORMATS)


@ALL
def test_a_template_says_which_form_its_model_writes(name: str) -> None:
    tokenizer = family(name)
    assert choose_format(AUTO, tokenizer.chat_template_source, tokenizer.special_texts) is FORMATS[name]
    assert choose_format(name, None) is FORMATS[name]
    assert choose_format(NONE, tokenizer.chat_template_source, tokenizer.special_texts) is None


@pytest.mark.parametrize("name", ["plain", "coder", "new_mistral"])
def test_other_forms_are_not_taken_for_known_ones(name: str) -> None:
    tokenizer = family(name)
    assert choose_format(AUTO, tokenizer.chat_template_source, tokenizer.special_texts) is None


def test_names_of_forms() -> None:
    assert choose_format(AUTO, None) is None
    assert {one.value for one in ToolCallParserChoice} == {AUTO, NONE, *FORMATS}
    with pytest.raises(ConfigError, match="hermes"):
        choose_format("other", None)


@ALL
def test_written_calls_are_read_again(name: str) -> None:
    calls = [("get", '{"a": "}]</tool_call>"}'), ("f-1", "{}")]
    result = read(FORMATS[name], write_calls(FORMATS[name], calls))
    assert [call[1:] for call in result.calls] == calls
    assert result.content == ""


def test_which_templates_know_tools() -> None:
    assert ChatTemplate(LLAMA3_TEMPLATE).knows_tools
    assert ChatTemplate("{% if x %}{% for t in tools or [] %}{{ t }}{% endfor %}{% endif %}").knows_tools
    assert not ChatTemplate("{% set tools = messages %}{{ tools }}").knows_tools
    assert not ChatTemplate("{{ message.tools }}").knows_tools
    assert not family("smollm2").template_knows_tools


def test_tools_and_calls_as_plain_messages() -> None:
    """For templates that know none: nothing is lost, and nothing but roles and text is left."""
    arguments = {"city": "Oslo"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [{"id": "a", "function": {"name": "get", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    kept = [dict(message) for message in messages]
    plain = plain_messages(messages, [tool("get")], FORMATS["smollm2"])
    assert messages == kept, "the caller's messages are not touched"
    assert [set(message) - {"name"} for message in plain] == [{"role", "content"}] * 4
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert '"name": "get"' in plain[0]["content"]
    assert plain[0]["content"].endswith("Be brief.")
    assert (
        plain[2]["content"]
        == 'Well.\n<tool_call>[{"name": "get", "arguments": {"city": "Oslo"}}]</tool_call>'
    )
    assert "rain" in plain[3]["content"]
    [system, *rest] = plain_messages(messages[1:], [tool("get")], FORMATS["smollm2"])
    assert system["role"] == "system"
    assert rest == plain[1:]
    assert plain_messages(messages[:2], [], FORMATS["smollm2"]) == messages[:2]


def test_shown_control_tokens_stay_in_the_text() -> None:
    tokenizer = family("mistral")
    ids = tokenizer.encode("[TOOL_CALLS]a[INST]b</s>", add_special_tokens=False)
    shown = tokenizer.special_ids_of(("[TOOL_CALLS]", "no such token"))
    assert len(shown) == 1
    for kwargs, text in (
        ({}, "ab"),
        ({"shown_special_token_ids": shown}, "[TOOL_CALLS]ab"),
        ({"shown_special_token_ids": shown, "skip_special_tokens": False}, "[TOOL_CALLS]a[INST]b</s>"),
    ):
        detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)  # type: ignore[arg-type]
        assert "".join(detokenizer.append(one) for one in ids) + detokenizer.finish() == text
