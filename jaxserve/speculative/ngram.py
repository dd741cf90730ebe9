"""Prompt lookup: what came behind the last few tokens earlier in prompt or output is likely to come again.

No model. Every place of a text is found by the tokens before it, in a table of hashes that grows with the output: a
step costs a few look-ups a request, however long its text is. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.request import Request
from jaxserve.scheduler.output import DraftRequest

_LONGEST, _SHORTEST = 4, 2  # tokens that have to be the same; longer ones are tried first
_MULTIPLIER = np.int64(6364136223846793005)  # of Knuth's MMIX generator; hashes wrap around


@dataclass(slots=True)
class _Index:
    """One request's text.

    Attributes:
      token_ids: prompt and output as far as they are indexed.
      ends: for each length, from _SHORTEST: hash of so many tokens -> where the text goes on behind their latest
        occurrence but the one at its very end.
    """

    token_ids: list[int] = field(default_factory=list)
    ends: tuple[dict[int, int], ...] = field(
        default_factory=lambda: tuple({} for _ in range(_SHORTEST, _LONGEST + 1))
    )


class NgramProposer:
    """Proposes the continuation of the latest earlier occurrence of the last tokens, the longest that has one."""

    def __init__(self) -> None:
        self._indices: dict[str, _Index] = {}

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._continuation(item.request, item.num_tokens) for item in wanted]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _continuation(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = _Index()
        fresh = request.token_ids(len(index.token_ids), request.num_tokens)
        _extend(index, fresh)
        text = index.token_ids
        tail = np.array(text[-_LONGEST:], np.int64)
        for length in range(min(_LONGEST, len(text)), _SHORTEST - 1, -1):
            [key] = _hashes(tail[-length:], length)
            end = index.ends[length - _SHORTEST].get(key)
            # Two texts of one hash are possible, if hardly: a proposal is no more than a guess.
            if end is not None:
                return _read(text, end, num_tokens)
        return ()


def _read(text: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; a text that ends before that is taken to repeat what it has there."""
    found = list(text[start : start + count])
    period = len(text) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)


def _extend(index: _Index, fresh: Sequence[int]) -> None:
    """Take in new tokens; every place but the last becomes one that can be found."""
    if not fresh:
        return
    old = len(index.token_ids)
    index.token_ids.extend(fresh)
    for length, ends in enumerate(index.ends, start=_SHORTEST):
        # Occurrences that end at `old` .. the one before the last token: the last one has nothing behind it yet.
        first = max(old, length)
        last = len(index.token_ids) - 1
        if first > last:
            continue
        window = np.array(index.token_ids[first - length : last], np.int64)
        ends.update(zip(_hashes(window, length), range(first, last + 1), strict=True))


def _hashes(token_ids: np.ndarray, length: int) -> list[int]:
    """A hash of every `length` tokens in a row."""
    count = len(token_ids) - length + 1
    hashes = np.zeros(count, np.int64)
    with np.errstate(over="ignore"):
        for offset in range(length):
            hashes = (hashes + token_ids[offset : offset + count] + 1) * _MULTIPLIER
    found: list[int] = hashes.tolist()
    return found
