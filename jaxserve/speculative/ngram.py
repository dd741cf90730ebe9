"""Prompt lookup: what came behind the last few tokens earlier in prompt or output is likely to come again.

No model. Every place of a text is found by the tokens before it, in tables that grow with the output: a step costs a
few microseconds a request, however long its text is. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.request import Request
from jaxserve.scheduler.output import DraftRequest

_DIGIT = 32  # bits of a token in a key
_PAIR, _TRIPLE, _QUADRUPLE = ((1 << _DIGIT * length) - 1 for length in (2, 3, 4))


@dataclass(slots=True)
class _Index:
    """One request's text.

    Attributes:
      token_ids: prompt and output as far as they are indexed.
      key: its last four tokens as digits, each one more than its id: so those of a text that is shorter are like no
        others.
      pairs, triples, quadruples: the key of so many tokens -> where the text goes on behind their latest occurrence,
        but for the one at its very end.
    """

    token_ids: list[int] = field(default_factory=list)
    key: int = 0
    pairs: dict[int, int] = field(default_factory=dict)
    triples: dict[int, int] = field(default_factory=dict)
    quadruples: dict[int, int] = field(default_factory=dict)


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
        _extend(index, request.token_ids(len(index.token_ids), request.num_tokens))
        key = index.key
        end = index.quadruples.get(key)  # the longest that has one
        if end is None:
            end = index.triples.get(key & _TRIPLE)
        if end is None:
            end = index.pairs.get(key & _PAIR)
        return () if end is None else _read(index.token_ids, end, num_tokens)


def _read(text: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; a text that ends before that is taken to repeat what it has there."""
    found = list(text[start : start + count])
    period = len(text) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)


def _extend(index: _Index, fresh: Sequence[int]) -> None:
    """Take in new tokens: what stood at the end until now can be found from here on."""
    key, pairs, triples, quadruples = index.key, index.pairs, index.triples, index.quadruples
    for end, token in enumerate(fresh, start=len(index.token_ids)):
        quadruples[key] = end
        triples[key & _TRIPLE] = end
        pairs[key & _PAIR] = end
        key = (key << _DIGIT | token + 1) & _QUADRUPLE
    index.key = key
    index.token_ids += fresh
