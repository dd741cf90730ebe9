"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library from the file's own fields.

Two kinds: `gpt2` (byte-level BPE; `tokenizer.ggml.pre` names how text is cut before merging) and `llama`
(SentencePiece BPE with byte fallback, where scores take the place of a merge list).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.checkpoint.gguf_reader import GgufFile
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.errors import CheckpointError

# Token types, as in llama.cpp's `llama_token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "command-r": _digits_then_gpt2,
    "codeshell": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "llama-v3": lambda: _split(_LLAMA3_SPLIT),
    "smaug-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def load_gguf_tokenizer(file: GgufFile) -> TokenizerParts:
    """Build the tokenizer from `tokenizer.ggml.*` and `tokenizer.chat_template`.

    Whether BOS is added: `tokenizer.ggml.add_bos_token`; where the file says nothing, yes for the SentencePiece kind
    and for Llama 3, no otherwise (as llama.cpp decides).

    Raises:
      CheckpointError: fields are missing or contradict each other, or the kind is not supported.
    """
    tokens = file.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{file.path}: holds no tokenizer (tokenizer.ggml.tokens is missing)")
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    kind = file.get("tokenizer.ggml.model")
    pre = file.get("tokenizer.ggml.pre")
    try:
        if kind == "gpt2":
            backend = _byte_level_bpe(file, tokens, pre)
        elif kind == "llama":
            backend = _sentencepiece_bpe(file, tokens, types)
        else:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are"
            )
        _add_tokens(backend, tokens, types)
    except CheckpointError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise CheckpointError(f"{file.path}: the tokenizer's fields are damaged ({error})") from error

    def token(key: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            return None
        if not 0 <= index < len(tokens):
            raise CheckpointError(f"{file.path}: tokenizer.ggml.{key}_token_id {index} is not a token")
        return tokens[index]

    bos = token("bos")
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3_NAMES))
    add_bos = add_bos and bos is not None
    if add_bos and bos is not None:
        add_bos_first(backend, bos)
    return TokenizerParts(
        backend=backend,
        chat_template=file.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=token("eos"),
        add_bos=add_bos,
        other_special={
            f"{name}_token": text
            for name, key in (("unk", "unknown"), ("pad", "padding"))
            if (text := token(key)) is not None
        },
    )


def add_bos_first(backend: Tokenizer, bos: str) -> None:
    """Make encoding with special tokens put `bos` before the text."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _byte_level_bpe(file: GgufFile, tokens: Sequence[str], pre: str | None) -> Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    lines = file.get("tokenizer.ggml.merges")
    if not lines:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges is missing")
    merges: list[tuple[str, str]] = []
    for line in lines:
        # A part may hold no space itself: byte-level spelling writes one as another character.
        left, space, right = line.partition(" ")
        if not space:
            raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {line!r}, which is not a pair")
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_bpe(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores is missing or of another length than the tokens"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((tokens[index] for index, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    mergeable = {token: index for token, index in vocab.items() if types[index] == _NORMAL}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(mergeable, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """A merge list that behaves as SentencePiece's rule: of all neighbouring pairs whose concatenation is a token,
    join the one whose result has the highest score.

    Args:
      vocab: tokens that may take part, with their ids.
      scores: by id.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, cut, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are matched in the text as a whole; control tokens (and the unknown one) are special."""
    added = []
    for index, type_ in enumerate(types):
        if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[index]:
            added.append(AddedToken(tokens[index], special=type_ != _USER_DEFINED, normalized=False))
    backend.add_tokens(added)
