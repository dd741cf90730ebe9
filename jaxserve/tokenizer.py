"""Text to token ids and back, around a Rust `tokenizers.Tokenizer` that is never changed after construction."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import CheckpointError, InvalidRequestError

UNBOUNDED = 2**62
_SHORT_TEXT_CHARS = 2048
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads: nothing in it changes after construction.

    Three rules that hold everywhere:

    * Text is the UTF-8 decoding of the tokens' bytes, each maximal invalid part replaced by U+FFFD. (The Rust
      library agrees for byte-level vocabularies; for SentencePiece byte tokens it replaces a whole run instead,
      which could change text that was already streamed.)
    * SentencePiece's leading space is dropped only from the very beginning of a text.
    * Text longer than a few thousand characters is tokenised with the interpreter lock released, so that other
      threads go on.

    Attributes:
      vocab_size: one more than the largest token id.
      bos_token_id, eos_token_id: ids of the named tokens, or None.
      special_token_ids: every id that is a control token.
      strips_leading_space: whether the first space of a text is dropped (SentencePiece).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        bos_token: str | None,
        eos_token: str | None,
        special_tokens: Iterable[str],
        add_bos: bool,
        template_variables: Mapping[str, Any],
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        vocab = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise CheckpointError("the tokenizer has an empty vocabulary")
        added = backend.get_added_tokens_decoder()
        flagged = {token.content for token in added.values() if token.special}
        missing = [
            text for text in (*special_tokens, bos_token, eos_token) if text in vocab and text not in flagged
        ]
        if missing:
            backend.add_special_tokens(
                [
                    tokenizers.AddedToken(text, special=True, normalized=False)
                    for text in dict.fromkeys(missing)
                ]
            )
            added = backend.get_added_tokens_decoder()
        # Two copies instead of one whose mode is switched: another thread may be encoding.
        self._parsing = backend
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.encode_special_tokens = True

        self.vocab_size = max(vocab.values()) + 1
        self.bos_token_id = _id_of("bos_token", bos_token, vocab)
        self.eos_token_id = _id_of("eos_token", eos_token, vocab)
        self._added_content = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_texts = tuple(
            sorted((self._added_content[i] for i in self.special_token_ids), key=len, reverse=True)
        )
        unk = getattr(backend.model, "unk_token", None)
        self._unk_id = vocab.get(unk) if isinstance(unk, str) else None
        self._adds_bos = add_bos
        self._chat_template = chat_template
        self._template_variables = {
            **({"bos_token": bos_token} if bos_token is not None else {}),
            **({"eos_token": eos_token} if eos_token is not None else {}),
            **template_variables,
        }
        steps = _flatten(backend.decoder, "decoders")
        self._pieces = _PieceDecoder(steps, byte_level_input=_has_byte_level(backend.pre_tokenizer))
        self.strips_leading_space = self._pieces.strips_leading_space
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._max_token_chars = _max_token_chars(backend, vocab)
        self._beginning_differs = self._text_start_matters()
        self._prefix_ids, self._suffix_ids = self._post_processor_ids()

    @classmethod
    def from_parts(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Iterable[str] = (),
        add_bos: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Build from what a checkpoint holds.

        Args:
          backend: is taken over: the caller must not change it any more. Padding and truncation are turned off.
          chat_template: Jinja source as in Hugging Face's `chat_template`.
          bos_token, eos_token: texts; also variables of the template.
          special_tokens: further texts of the vocabulary to be treated as control tokens, where the backend does
            not say so itself.
          add_bos: `encode` puts the BOS token in front even if the backend's post-processor does not.
          template_variables: more variables of the template, e.g. ``{"unk_token": "<unk>"}``.

        Raises:
          CheckpointError: a template with a syntax error, a BOS/EOS token outside the vocabulary, a decoder of a
            kind that can't be streamed.
        """
        return cls(
            backend,
            chat_template=ChatTemplate(chat_template) if chat_template is not None else None,
            bos_token=bos_token,
            eos_token=eos_token,
            special_tokens=special_tokens,
            add_bos=add_bos,
            template_variables=template_variables or {},
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str | None:
        """Jinja source of the chat template."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template shows the model the tools that it is given."""
        return self._chat_template is not None and self._chat_template.knows_tools

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all control tokens."""
        return self._special_texts

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Ids of the control tokens with these texts, as far as there are such."""
        return frozenset(i for i in self.special_token_ids if self._added_content[i] in texts)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token (skipped in text by default)."""
        return token_id in self.special_token_ids

    def max_chars_for(self, max_tokens: int) -> int:
        """Most characters that can ever become `max_tokens` tokens: longer text need not be tokenised to know
        that it is too long. `UNBOUNDED` for tokenizers that may drop or merge any amount of white space.

        Characters that the vocabulary can't spell at all (it drops them) count like any other."""
        return min(UNBOUNDED, self._max_token_chars * max_tokens)

    # -- text to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
          add_special_tokens: let the model's own rule add BOS (or whatever it adds).
          parse_special: True reads the text of a special token as that token; False as plain characters.

        Raises:
          InvalidRequestError: half of a surrogate pair stands alone, so the text has no UTF-8 form.
        """
        _require_unicode(text)
        if parse_special:
            ids = _encode_ids(self._parsing, text, add_special_tokens)
        else:
            ids = self._encode_plain(text)
            if add_special_tokens:
                ids = [*self._prefix_ids, *ids, *self._suffix_ids]
        bos = self.bos_token_id
        if add_special_tokens and self._adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template.

        Text of special tokens inside anything that `messages`, `tools` or `template_kwargs` hold becomes plain
        characters, so nobody can forge a turn; only the template itself writes control tokens. BOS is added only
        where the template writes it.

        Args:
          messages: each with a `role` and a `content` (text, or a list of text parts, joined by newlines).
          add_generation_prompt: open the assistant's turn at the end.
          continue_final_message: leave the last message (the assistant's) open instead, so that the reply goes on
            where it stops; no generation prompt then.
          tools: what the model may call, as `{"type": "function", "function": {...}}`.
          template_kwargs: further variables for the template.

        Raises:
          InvalidRequestError: no template, messages of a wrong form, or the template refuses them.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: use completions with a prompt of your own", param="messages"
            )
        rendered = self._chat_template.render(
            messages,
            special_texts=self._special_texts,
            variables=self._template_variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs or {},
        )
        return self._encode_marked(rendered.text, rendered.marker)

    def _encode_marked(self, text: str, marker: str) -> list[int]:
        """Encode template output in which `marker` breaks every special token that came from a client."""
        if marker not in text:
            return _encode_ids(self._parsing, text, False)
        # The library itself finds the template's own control tokens: none that holds a marker can match.
        encoding = self._parsing.encode_batch([text], add_special_tokens=False)[0]
        found, offsets = encoding.ids, encoding.offsets
        ids: list[int] = []
        start_token, start_char = 0, 0
        for index in range(len(found) + 1):
            at_end = index == len(found)
            if not at_end and not self._is_control(found[index]):
                continue
            begin, end = (len(text), len(text)) if at_end else offsets[index]
            segment = text[start_char:begin]
            if marker in segment:
                ids += self._encode_segment(segment.replace(marker, ""), first=start_char == 0)
            else:
                ids += found[start_token:index]
            if not at_end:
                ids.append(found[index])
            start_token, start_char = index + 1, end
        return ids

    def _encode_segment(self, text: str, *, first: bool) -> list[int]:
        """Plain encoding of a piece of a longer text; `first`: it stands at the very beginning."""
        if first or not self._beginning_differs:
            return self._encode_plain(text)
        # After a newline a SentencePiece vocabulary adds no space of its own.
        newline = self._encode_plain("\n")
        ids = self._encode_plain("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        ids = _encode_ids(self._plain, text, False)
        if not self._leaks(ids):
            return ids
        # A vocabulary can spell a control token out of plain text as well (one that skips merges for whole words
        # does). Cut such texts in two, which no vocabulary can put together again.
        pattern = re.compile(
            "|".join(re.escape(special) for special in self._special_texts if len(special) > 1)
        )
        cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
        return [
            token
            for start, stop in itertools.pairwise(cuts)
            for token in _encode_ids(self._plain, text[start:stop], False)
        ]

    def _leaks(self, plain_ids: list[int]) -> bool:
        return any(self._is_control(token) for token in set(plain_ids))

    def _is_control(self, token_id: int) -> bool:
        return token_id in self.special_token_ids and token_id != self._unk_id

    def _text_start_matters(self) -> bool:
        """Whether a word is tokenised differently at the very beginning of a text than after a special token."""
        if not self._special_texts:
            return False
        after = _encode_ids(self._parsing, self._special_texts[0] + "a", False)[1:]
        return after != _encode_ids(self._parsing, "a", False)

    def _post_processor_ids(self) -> tuple[list[int], list[int]]:
        """What the backend's post-processor puts around any text."""
        bare, whole = (_encode_ids(self._parsing, "a", add_special) for add_special in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    # -- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` as a whole text. Ids outside the vocabulary (a model's padding rows) add nothing."""
        raw = b"".join([self.output_bytes(token, skip_special_tokens) for token in ids])
        if self.strips_leading_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Bytes that a token adds to a text: nothing for a skipped special token."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, UTF-8 for special ones; empty for ids outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            if token_id in self._added_content:
                known = self._added_content[token_id].encode()
            else:
                piece = self._parsing.id_to_token(token_id)
                known = b"" if piece is None else self._pieces.to_bytes(piece)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, for reports; broken UTF-8 shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class _PieceDecoder:
    """Turns vocabulary pieces into bytes by the steps of the backend's decoder."""

    def __init__(self, steps: list[dict[str, Any]], *, byte_level_input: bool) -> None:
        self.byte_level = byte_level_input and not steps
        self.byte_fallback = False
        self.strips_leading_space = False
        self._replacements: list[tuple[str, str]] = []
        for step in steps:
            self._add(step)
        self._byte_of = {char: byte for byte, char in enumerate(_byte_level_alphabet())}

    def _add(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Fuse":
            pass
        elif kind == "Metaspace":
            self._replacements.append((step.get("replacement", _METASPACE), " "))
            self.strips_leading_space |= step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            self.strips_leading_space = True
        else:
            raise CheckpointError(f"the tokenizer's decoder step {kind!r} can't be streamed token by token")

    def to_bytes(self, piece: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([self._byte_of[char] for char in piece])
            except KeyError:  # not in the byte alphabet: a piece that stands for itself
                return piece.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _byte_level_alphabet() -> list[str]:
    """Character that stands for each byte in a byte-level vocabulary (GPT-2): printable Latin-1 stands for itself,
    the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _encode_ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _SHORT_TEXT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    # `encode` keeps the interpreter lock for its whole run; the batch form releases it.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has an unpaired surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
        ) from None


def _id_of(name: str, text: str | None, vocab: Mapping[str, int]) -> int | None:
    if text is None:
        return None
    if text not in vocab:
        raise CheckpointError(f"{name} {text!r} is not in the tokenizer's vocabulary")
    return vocab[text]


def _flatten(component: Any, children: str) -> list[dict[str, Any]]:
    """A backend component as the flat list of its steps' settings; empty for None."""
    if component is None:
        return []
    pending = [json.loads(component.__getstate__())]
    steps = []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = list(step[children]) + pending
        else:
            steps.append(step)
    return steps


def _has_byte_level(pre_tokenizer: Any) -> bool:
    return any(step["type"] == "ByteLevel" for step in _flatten(pre_tokenizer, "pretokenizers"))


def _max_token_chars(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int:
    """Most characters of input that one token can stand for, or UNBOUNDED where nothing limits them."""
    longest = max(map(len, vocab))
    for token in backend.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip:  # swallows any amount of whitespace
            return UNBOUNDED
    for step in _flatten(backend.normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFKC"):
            longest *= 4  # the longest canonical decomposition has four characters
        elif step["type"] not in ("NFD", "NFKD", "Prepend") and not (
            step["type"] == "Replace" and len(step["pattern"].get("String", "xx")) == 1 and step["content"]
        ):
            return UNBOUNDED
    for step in _flatten(backend.pre_tokenizer, "pretokenizers"):
        keeps_all = step["type"] in ("ByteLevel", "Digits", "Metaspace") or (
            step["type"] == "Split" and step["behavior"] != "Removed"
        )
        if not keeps_all:
            return UNBOUNDED
    return longest
