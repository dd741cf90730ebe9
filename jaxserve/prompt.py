"""Prompts as Python programs give them, and what the model sees of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What the model sees of a prompt, and the text that it is of; None for one given as token ids."""

    text: str | None
    token_ids: list[int]


def as_prompts(prompts: Any) -> Sequence[Prompt]:
    """A single prompt as a list of one; a list of integers is a single prompt.

    Raises:
      InvalidRequestError: it is neither a prompt nor a list of them; names `prompt`.
    """
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise InvalidRequestError(
            f"prompts are text, token ids, or a list of such, got {type(prompts).__name__}", param="prompt"
        )
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and _is_token_id(prompts[0])):
        return [prompts]
    return prompts


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer, *, max_tokens: int) -> PromptTokens:
    """Encode a prompt.

    Args:
      max_tokens: most that any request can hold; text that is sure to have more is not encoded at all.

    Raises:
      InvalidRequestError: it is no prompt, or such a text; names `prompt`.
    """
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys not in ({"prompt"}, {"prompt_token_ids"}):
            raise InvalidRequestError(
                f"a prompt object has either 'prompt' or 'prompt_token_ids', got {sorted(map(str, keys))}",
                param="prompt",
            )
        prompt = next(iter(prompt.values()))
    if isinstance(prompt, str):
        if len(prompt) > tokenizer.max_chars_for(max_tokens):
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} characters, more than {max_tokens} tokens can hold",
                param="prompt",
                code="context_length_exceeded",
            )
        return PromptTokens(prompt, tokenizer.encode(prompt))
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__getitem__"):
        raise InvalidRequestError(
            f"a prompt is text or a list of token ids, got {type(prompt).__name__}", param="prompt"
        )
    try:
        return PromptTokens(None, [_token_id(token) for token in prompt])
    except TypeError:
        raise InvalidRequestError("a prompt's token ids must be integers", param="prompt") from None


def _is_token_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not hasattr(value, "__len__")


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is no token id")
    return operator.index(value)
