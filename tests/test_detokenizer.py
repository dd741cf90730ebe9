"""Incremental detokenising: the pieces are the whole, at every step, for any tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer import Tokenizer
from tests.text_models import byte_tokens, sentencepiece, smollm2, token_with_bytes

EMOJI = "🫠🥹🦩🪿龜é\ufffd日本語👨‍👩‍👧🇫🇷"


def tokenizer_named(name: str) -> Tokenizer:
    return smollm2() if name == "smollm2" else sentencepiece(name)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Loading is no part of drawing an example."""
    smollm2()


NAMES = pytest.mark.parametrize("name", ["smollm2", "prepend", "metaspace_first"])


@st.composite
def token_sequences(draw, tokenizer: Tokenizer, max_parts: int = 12) -> list[int]:
    """Whole texts, single bytes, any ids (special and outside the vocabulary included), mixed."""
    single_bytes = [i for i in range(min(tokenizer.vocab_size, 300)) if len(tokenizer.token_bytes(i)) == 1]
    part = st.one_of(
        st.text(alphabet=EMOJI + "ab ", max_size=6).map(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        ),
        st.lists(st.sampled_from(single_bytes), max_size=6),
        st.text(alphabet=EMOJI, min_size=1, max_size=2)
        .flatmap(lambda text: st.integers(0, len(text.encode())).map(lambda n: text.encode()[:n]))
        .map(lambda raw: _known_bytes(tokenizer, raw)),
        st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=3),
        st.lists(st.sampled_from(sorted(tokenizer.special_token_ids)), max_size=2),
    )
    return [token for piece in draw(st.lists(part, max_size=max_parts)) for token in piece]


_TABLES: dict[int, dict[bytes, int]] = {}


def _known_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    table = _TABLES.setdefault(
        id(tokenizer),
        {
            tokenizer.token_bytes(i): i
            for i in range(min(tokenizer.vocab_size, 300))
            if len(tokenizer.token_bytes(i)) == 1
        },
    )
    return [table[bytes([byte])] for byte in raw if bytes([byte]) in table]


def append_all(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
    return "".join(detokenizer.append(token_id) for token_id in token_ids)


@NAMES
@settings(max_examples=120)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_are_the_one_shot_text(name, data, skip):
    """B001, B005: whatever the tokens, every intermediate text is a prefix of the final one, and no replacement
    character appears that the final text lacks."""
    tokenizer = tokenizer_named(name)
    ids = data.draw(token_sequences(tokenizer))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    shown = ""
    for position, token in enumerate(ids, 1):
        delta = detokenizer.append(token)
        delta.encode()
        shown += delta
        assert whole.startswith(shown)
        certain = tokenizer.decode(ids[:position], skip_special_tokens=skip).rstrip("\ufffd")
        assert len(shown) >= len(certain), "text that was certain is held back"
    assert shown + detokenizer.finish() == whole


@NAMES
@settings(max_examples=120)
@given(data=st.data(), skip=st.booleans())
def test_output_after_a_prompt_is_what_the_prompt_does_not_show(name, data, skip):
    """B003: wherever the prompt is cut, prompt text and output text make up the text of both."""
    tokenizer = tokenizer_named(name)
    ids = data.draw(token_sequences(tokenizer))
    split = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:split], ids[split:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = append_all(detokenizer, output) + detokenizer.finish()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert whole.endswith(text)
    before = whole[: len(whole) - len(text)]
    prompt_alone = tokenizer.decode(prompt, skip_special_tokens=skip)
    # The prompt shows its whole characters; a broken end of it shows as U+FFFD only if the output does not finish it.
    assert prompt_alone in (before, before + "\ufffd")


def test_a_character_begun_in_the_prompt_belongs_to_the_output_that_completes_it():
    tokenizer = smollm2()
    emoji = "🦩".encode()
    for cut in range(1, 4):
        prompt = tokenizer.encode("Hello world ") + byte_tokens(tokenizer, emoji[:cut])
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        assert append_all(detokenizer, byte_tokens(tokenizer, emoji[cut:])) == "🦩"
        broken = IncrementalDetokenizer(tokenizer, prompt)
        assert append_all(broken, tokenizer.encode("no")) == "no"  # its broken end is the prompt's
        assert broken.finish() == ""
        silent = IncrementalDetokenizer(tokenizer, prompt)
        assert silent.finish() == ""


def test_a_real_replacement_character_is_not_taken_for_a_broken_one():
    tokenizer = smollm2()
    raw = "\ufffd".encode()
    for cut in range(1, 3):
        detokenizer = IncrementalDetokenizer(tokenizer, byte_tokens(tokenizer, raw[:cut]))
        assert append_all(detokenizer, byte_tokens(tokenizer, raw[cut:])) + detokenizer.finish() == "\ufffd"


def test_emoji_arrive_whole():
    """B001: byte tokens of emoji, one at a time."""
    tokenizer = smollm2()
    text = "🫠🥹🦩🪿龜"
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_invalid_bytes_flow_for_ever():
    """B006: no window grows; each lone continuation byte is shown as soon as it is known to be one."""
    tokenizer = smollm2()
    lone = token_with_bytes(tokenizer, b"\x80")
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(1500):
        assert detokenizer.append(lone) == "\ufffd"
    lead = token_with_bytes(tokenizer, b"\xf0")
    shown = "".join(detokenizer.append(lead) for _ in range(1500))
    assert len(shown) == 1499
    assert detokenizer.finish() == "\ufffd"


def test_an_unfinished_character_at_the_end_is_one_replacement_character():
    """B004: as a one-shot decoding shows it."""
    tokenizer = smollm2()
    ids = byte_tokens(tokenizer, "🦩".encode()[:3])
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert append_all(detokenizer, ids) == ""
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["prepend", "metaspace_first"])
def test_sentencepiece_spaces(kind):
    """The leading space is dropped from the beginning of a text, and kept after a prompt."""
    tokenizer = sentencepiece(kind)
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello world"
    after_bos = IncrementalDetokenizer(tokenizer, [tokenizer.bos_token_id])
    assert append_all(after_bos, ids) == "hello world"
    after_text = IncrementalDetokenizer(tokenizer, tokenizer.encode("the"))
    assert append_all(after_text, ids) == " hello world"


def test_state_does_not_grow():
    """B159: what a token costs can't depend on the tokens before, because none of them is kept."""
    tokenizer = smollm2()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("The quick brown fox 🦩 ")

    def size() -> int:
        return sum(sys.getsizeof(value) for value in vars(detokenizer).values()) + len(detokenizer._pending())

    append_all(detokenizer, ids)
    small = size()
    for _ in range(300):
        append_all(detokenizer, ids)
    assert size() == small
