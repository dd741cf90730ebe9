"""What a tokenizer is made of, whichever files it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Attributes:
    backend: the `tokenizers` pipeline; which of its added tokens are special is recorded in there.
    chat_template: Jinja source, or None for a model without one.
    add_bos: whether encoding with special tokens puts the BOS token first.
    other_special: further special tokens that have a name, e.g. ``{"unk_token": "<unk>"}``; templates may use them.
    """

    backend: Backend
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool = False
    other_special: Mapping[str, str] = field(default_factory=dict)

    def token_id(self, token: str | None) -> int | None:
        """Id of a token, None for None and for a token that the vocabulary lacks."""
        return None if token is None else self.backend.token_to_id(token)


def check_ids_fit(parts: TokenizerParts, vocab_size: int, where: Path) -> None:
    """Raises:
    CheckpointError: the tokenizer can produce ids for which the model has no embedding.
    """
    highest = max(parts.backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest < 0:
        raise CheckpointError(f"{where}: the tokenizer has no tokens")
    if highest >= vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has ids up to {highest}, but the model's vocabulary ends at {vocab_size - 1} "
            "(a tokenizer of another model?)"
        )
