"""A priority queue from which anything can be taken out, and which knows how much work is ahead of a place in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# (class, priority, tag, order of add()), see `policy.Order`: smaller goes first; no two are equal.
Key = tuple[int, int, float, int]

_CHUNK = 256  # entries; a chunk of twice as many is split


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """What a part of a queue amounts to.

    Attributes:
      seqs: sequences.
      tokens: that they have to compute before their next output token.
      outputs: output tokens that they are expected to produce.
    """

    seqs: int = 0
    tokens: int = 0
    outputs: int = 0

    def __add__(self, other: QueuedWork) -> QueuedWork:
        return QueuedWork(self.seqs + other.seqs, self.tokens + other.tokens, self.outputs + other.outputs)


@dataclass(slots=True)
class _Chunk:
    """Neighbours in the order, as parallel lists, so that sums over a part are quick; and the sums over all."""

    keys: list[Key] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    sum_tokens: int = 0
    sum_outputs: int = 0

    def cut_off(self, at: int) -> _Chunk:
        """Remove everything from place `at` on, and return it."""
        right = _Chunk(self.keys[at:], self.ids[at:], self.tokens[at:], self.outputs[at:])
        right.sum_tokens, right.sum_outputs = sum(right.tokens), sum(right.outputs)
        del self.keys[at:], self.ids[at:], self.tokens[at:], self.outputs[at:]
        self.sum_tokens -= right.sum_tokens
        self.sum_outputs -= right.sum_outputs
        return right


class WaitingQueue:
    """Request ids by key, in sorted chunks of some hundred.

    `push` and `remove` cost O(log n) comparisons and move one chunk's pointers; `peek` is O(1); `ahead_of` adds up the
    sums of n / 256 chunks, and one chunk.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []  # none is empty
        self._lasts: list[Key] = []  # the last key of each
        self._keys: dict[str, Key] = {}
        self._tokens = self._outputs = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def push(self, key: Key, request_id: str, tokens: int = 0, outputs: int = 0) -> None:
        """Queue an id; `tokens`, `outputs`: see `QueuedWork`."""
        assert request_id not in self._keys, f"{request_id} is queued already"
        self._keys[request_id] = key
        if not self._chunks:
            self._chunks.append(_Chunk())
            self._lasts.append(key)
        at = min(bisect_left(self._lasts, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        place = bisect_left(chunk.keys, key)
        chunk.keys.insert(place, key)
        chunk.ids.insert(place, request_id)
        chunk.tokens.insert(place, tokens)
        chunk.outputs.insert(place, outputs)
        self._count(chunk, tokens, outputs)
        self._lasts[at] = chunk.keys[-1]
        if len(chunk.keys) >= 2 * _CHUNK:
            self._chunks.insert(at + 1, chunk.cut_off(_CHUNK))
            self._lasts.insert(at, chunk.keys[-1])

    def _count(self, chunk: _Chunk, tokens: int, outputs: int) -> None:
        chunk.sum_tokens += tokens
        chunk.sum_outputs += outputs
        self._tokens += tokens
        self._outputs += outputs

    def peek(self) -> tuple[Key, str] | None:
        """The first entry, left in the queue; None when empty."""
        if not self._chunks:
            return None
        chunk = self._chunks[0]
        return chunk.keys[0], chunk.ids[0]

    def remove(self, request_id: str) -> None:
        """Take out an entry that is queued (KeyError otherwise)."""
        key = self._keys.pop(request_id)
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        place = bisect_left(chunk.keys, key)
        self._count(chunk, -chunk.tokens[place], -chunk.outputs[place])
        del chunk.keys[place], chunk.ids[place], chunk.tokens[place], chunk.outputs[place]
        if chunk.keys:
            self._lasts[at] = chunk.keys[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def ahead_of(self, key: Key) -> QueuedWork:
        """The work of all entries before `key`."""
        at = bisect_left(self._lasts, key)
        before = self._chunks[:at]
        seqs = sum(len(chunk.keys) for chunk in before)
        tokens = sum(chunk.sum_tokens for chunk in before)
        outputs = sum(chunk.sum_outputs for chunk in before)
        if at < len(self._chunks):
            chunk = self._chunks[at]
            place = bisect_left(chunk.keys, key)
            seqs += place
            tokens += sum(chunk.tokens[:place])
            outputs += sum(chunk.outputs[:place])
        return QueuedWork(seqs, tokens, outputs)

    def total(self) -> QueuedWork:
        """The work of all entries."""
        return QueuedWork(len(self._keys), self._tokens, self._outputs)
