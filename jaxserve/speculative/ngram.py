"""Prompt lookup: what came behind the last few tokens earlier in prompt or output is likely to come again.

No model. Each place of a text is linked to the one before it with the same two tokens in front, so a step costs a few
microseconds a request, however long its text is. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.request import Request
from jaxserve.scheduler.output import DraftRequest

_DIGIT = 32  # bits of a token in a key
_PAIR = (1 << 2 * _DIGIT) - 1
_MOST_COMPARED = 32  # places with the same two tokens in front, the latest first


@dataclass(slots=True)
class _Index:
    """One request's text.

    Attributes:
      token_ids: prompt and output as far as they are indexed.
      key: its last two tokens as digits, each one more than its id: so those of a text that is shorter are like no
        others.
      latest: key -> where the text goes on behind the latest such tokens, but for those at its very end.
      earlier: for each place: the one before it that is under the same key; 0: none.
    """

    token_ids: list[int] = field(default_factory=list)
    key: int = 0
    latest: dict[int, int] = field(default_factory=dict)
    earlier: list[int] = field(default_factory=list)


class NgramProposer:
    """Proposes the continuation of an earlier occurrence of the last two tokens: of the latest that has two more in
    common before these, else one more, else none.
    """

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
        _extend(index, request.token_ids(len(index.token_ids), request.num_tokens))
        end = _find(index)
        return _read(index.token_ids, end, num_tokens) if end else ()


def _find(index: _Index) -> int:
    """Where the text goes on behind tokens like its last ones; 0: nowhere."""
    text, earlier = index.token_ids, index.earlier
    latest = end = index.latest.get(index.key, 0)
    third_last, fourth_last = text[-3:-2], text[-4:-3]
    with_third = 0
    for _ in range(_MOST_COMPARED):
        if end < 3:
            break
        if text[end - 3 : end - 2] == third_last:
            if end > 3 and text[end - 4 : end - 3] == fourth_last:
                return end
            with_third = with_third or end
        end = earlier[end]
    return with_third or latest


def _read(text: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; a text that ends before that is taken to repeat what it has there."""
    found = list(text[start : start + count])
    period = len(text) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)


def _extend(index: _Index, fresh: Sequence[int]) -> None:
    """Take in new tokens: what stood at the end until now can be found from here on."""
    key, latest, earlier = index.key, index.latest, index.earlier
    for end, token in enumerate(fresh, start=len(index.token_ids)):
        earlier.append(latest.get(key, 0))
        latest[key] = end
        key = (key << _DIGIT | token + 1) & _PAIR
    index.key = key
    index.token_ids += fresh
