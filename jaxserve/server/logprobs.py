"""Logprobs in the shapes of the two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.outputs import TokenLogprobs

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: for each token its text, its exact bytes, and the alternatives."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.top[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """One object a prompt token, by token id as vLLM has it: the token itself and the alternatives; null first."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        tokens = {
            str(token): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for rank, (token, logprob) in enumerate(entry.top, start=1)
        }
        tokens[str(entry.token_id)] = {
            "logprob": entry.logprob,
            "rank": entry.rank,
            "decoded_token": tokenizer.token_text(entry.token_id),
        }
        result.append(tokens)
    return result


class CompletionLogprobs:
    """Builds `logprobs` of a completions choice piece by piece, keeping count of the characters before each token.

    `text_offset` of a token is the place, in characters of the choice's whole text, of the first character that the
    token has a part in. Bytes that are no character of their own are written `bytes:\\xf0`, so that alternatives
    which differ do not fall together; a token that adds no text (a skipped special token) stands where it would.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def add_prompt(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The lists for an echoed prompt, whose text is `text`."""
        offsets = []
        for token in token_ids:
            offsets.append(min(self._num_chars, len(text)))
            data = self._tokenizer.token_bytes(token)
            if self._tokenizer.is_special(token) and not text.startswith(
                data.decode("utf-8", "replace"), self._num_chars
            ):
                data = b""  # an added BOS, or one that the text leaves out
            self._advance(data)
        self._num_chars = len(text)
        self._decoder.reset()
        self._at_start = False
        return self._lists(token_ids, entries, offsets)

    def add(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, limit: int | None = None
    ) -> dict[str, list[Any]]:
        """The lists for the next generated tokens. `limit`: length of the whole text, where it has ended."""
        offsets = []
        for token in token_ids:
            offsets.append(self._num_chars)
            self._advance(self._tokenizer.output_bytes(token, self._skip_special_tokens))
        if limit is not None:
            offsets = [min(offset, limit) for offset in offsets]
        return self._lists(token_ids, entries, offsets)

    def _lists(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, list[Any]]:
        return {
            "tokens": [self._token(token) for token in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _advance(self, data: bytes) -> None:
        if self._at_start and data:
            self._at_start = False
            if self._tokenizer.strips_leading_space and data.startswith(b" "):
                data = data[1:]
        self._num_chars += len(self._decoder.decode(data))

    def _token(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._token(token): logprob for token, logprob in entry.top[: self._num_top]}
        top.setdefault(self._token(entry.token_id), entry.logprob)
        return top


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }
