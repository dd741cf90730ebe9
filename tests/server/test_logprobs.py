from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.outputs import TokenLogprobs
from jaxserve.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from jaxserve.server.responses import merge_logprobs
from jaxserve.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("ab 1\n\té龜🫠🥹👩\u200d\u0301"), max_size=12)


def entries(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, 2, ((0, -0.25), (token, -1.0))) for token in ids]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXTS.filter(bool), output=TEXTS, cut=st.integers(0, 5))
def test_offsets_point_at_each_tokens_characters(
    tokenizer: Tokenizer, prompt: str, output: str, cut: int
) -> None:
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(output)
    builder = CompletionLogprobs(tokenizer, 2, skip_special_tokens=True)
    lists = builder.add_prompt(prompt, prompt_ids, [None, *entries(prompt_ids[1:])])
    for part in (ids[:cut], ids[cut:]):
        lists = merge_logprobs(lists, builder.add(part, entries(part)))
    text = prompt + output
    assert {len(values) for values in lists.values()} == {len(prompt_ids) + len(ids)}
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(lists["tokens"], offsets, strict=True):
        if token.startswith("bytes:"):
            first = bytes.fromhex(token[6:].replace("\\x", ""))[:1]
            assert first in text[offset].encode() or offset == len(text)
        else:
            assert text[offset : offset + len(token)] == token
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None


def test_a_special_token_has_a_place_and_no_width(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), 2, *tokenizer.encode(" two")]
    hidden = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True).add(ids, entries(ids))
    assert hidden["text_offset"] == [0, 3, 3]
    shown = CompletionLogprobs(tokenizer, 0, skip_special_tokens=False).add(ids, entries(ids))
    assert shown["text_offset"] == [0, 3, 3 + len("<|im_end|>")]


def test_a_prompt_text_with_special_tokens_in_it(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhi"
    ids = tokenizer.encode(text)
    builder = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True)
    lists = builder.add_prompt(text, ids, [None, *entries(ids[1:])])
    assert [
        text[offset:].startswith(token)
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True)
    ]
    assert lists["text_offset"][1] == len("<|im_start|>")
    # A BOS that was added is not in the text.
    added = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True).add_prompt(
        "hi", [1, *tokenizer.encode("hi")], [None, *entries(tokenizer.encode("hi"))]
    )
    assert added["text_offset"] == [0, 0]


def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🫠")[:-1]
    text = tokenizer.decode(ids)
    assert text == "a\ufffd"
    builder = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True)
    builder.add_prompt(text, ids, [None, *entries(ids[1:])])
    following = tokenizer.encode("b")
    assert builder.add(following, entries(following))["text_offset"] == [len(text)]


def test_the_end_of_the_text_limits_offsets(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    lists = CompletionLogprobs(tokenizer, 0, skip_special_tokens=True).add(ids, entries(ids), limit=4)
    assert lists["text_offset"] == [0, 3, 4]


def test_alternatives(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("one")[0]
    entry = TokenLogprobs(token, -3.0, 5, ((100, -0.1), (101, -0.2), (102, -0.3)))

    def top(count: int) -> dict[str, float]:
        return CompletionLogprobs(tokenizer, count, skip_special_tokens=True).add([token], [entry])[
            "top_logprobs"
        ][0]

    assert top(0) == {"one": -3.0}
    assert len(top(1)) == 2
    assert len(top(3)) == 4
    content: list[Any] = chat_logprobs(tokenizer, [entry], 2)["content"]
    assert content[0]["bytes"] == list(b"one")
    assert [alternative["logprob"] for alternative in content[0]["top_logprobs"]] == [-0.1, -0.2]


def test_prompt_logprobs_hold_the_token_itself(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(500, -3.0, 5, ((100, -0.1),))
    first, second = prompt_logprobs(tokenizer, [None, entry])
    assert first is None
    assert second is not None
    assert second["500"]["rank"] == 5
    assert second["100"]["rank"] == 1
