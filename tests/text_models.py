"""Tokenizers that the tests of text share: the demo model's, and small ones of the SentencePiece kind."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.tokenizer import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
SPACE = "\u2581"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def smollm2() -> Tokenizer:
    """The real one, out of the converted checkpoint."""
    from jaxserve.checkpoint import open_checkpoint, resolve_model

    return open_checkpoint(resolve_model("smollm2", store=REPOSITORY / "checkpoints")).load_tokenizer()


@functools.cache
def smollm2_backend_json() -> str:
    """The Rust library's description of the real one."""
    return smollm2()._parsing.to_str()


@functools.cache
def smollm2_with_template(template: str | None) -> Tokenizer:
    return Tokenizer.from_parts(
        tokenizers.Tokenizer.from_str(smollm2_backend_json()),
        chat_template=template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


@functools.cache
def smollm2_backend() -> tokenizers.Tokenizer:
    """The Rust library on its own, to compare with. Not to be changed."""
    return tokenizers.Tokenizer.from_str(smollm2_backend_json())


Kind = Literal["prepend", "metaspace_first"]


@functools.cache
def sentencepiece(kind: Kind, *, chat_template: str | None = None) -> Tokenizer:
    """A small vocabulary as Llama 2 has it: byte fallback, `▁` for spaces, BOS in front.

    kind: a normalizer that puts `▁` in front of each stretch of text, or a pre-tokenizer that does so only at the
    very beginning.
    """
    vocab: dict[str, int] = {}

    def add(piece: str) -> None:
        vocab.setdefault(piece, len(vocab))

    for piece in ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE):
        add(piece)
    for code in range(0x21, 0x7F):
        add(chr(code))
    merges = []
    for word in (f"{SPACE}hello", f"{SPACE}world", f"{SPACE}the", "ing", f"{SPACE}{SPACE}{SPACE}{SPACE}"):
        for cut in range(1, len(word)):
            pair = (word[:cut], word[cut])
            add(pair[0] + pair[1])
            if pair not in merges:
                merges.append(pair)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first", split=False
        )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return Tokenizer.from_parts(backend, chat_template=chat_template, bos_token="<s>", eos_token="</s>")


def token_with_bytes(tokenizer: Tokenizer, raw: bytes) -> int:
    """The id of the token whose bytes are `raw`."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == raw)


def byte_tokens(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """`raw` as one token a byte."""
    return [token_with_bytes(tokenizer, bytes([byte])) for byte in raw]
