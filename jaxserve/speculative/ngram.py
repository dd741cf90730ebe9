"""Prompt lookup: what came behind the last few tokens earlier in prompt or output is likely to come again.

No model. Every place of a text is found by the tokens before it, in tables that grow with the output: a step costs a
few microseconds a request, however long its text is. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.request import Request
from jaxserve.scheduler.output import DraftRequest

_LENGTHS = (4, 3, 2)  # tokens that have to be the same; the longest is tried first


@dataclass(slots=True)
class _Index:
    """One request's text.

    Attributes:
      token_ids: prompt and output as far as they are indexed.
      ends: for each of _LENGTHS: so many tokens -> where the text goes on behind their latest occurrence, but for the
        one at its very end.
    """

    token_ids: list[int] = field(default_factory=list)
    ends: tuple[dict[tuple[int, ...], int], ...] = field(default_factory=lambda: tuple({} for _ in _LENGTHS))


class NgramProposer:
    """Proposes the continuation of the latest earlier occurrence of the last tokens, the longest that has one."""

    uses_device = False

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
        for length, ends in zip(_LENGTHS, index.ends, strict=True):
            end = ends.get(tuple(text[-length:]))
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
    old, text = len(index.token_ids), index.token_ids
    text.extend(fresh)
    for length, ends in zip(_LENGTHS, index.ends, strict=True):
        # Those that end where the text ended before, up to the one before the last token: that has nothing behind it.
        first, last = max(old, length), len(text) - 1
        window = text[first - length : last] if first <= last else []
        runs = zip(*(window[offset:] for offset in range(length)), strict=False)
        ends.update(zip(runs, range(first, last + 1), strict=False))
