"""Stop strings in streamed text: found as soon as they are complete, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Watches one output for stop strings.

    The first stop string to be complete ends the output; of several that end at the same character, the longest. That
    makes the result independent of how the text is cut into tokens and steps.

    Cost: constant per character and stop string under way (Knuth-Morris-Pratt), next to nothing for stop strings
    whose first character does not occur; nothing is prepared in advance.

    Attributes:
      matched: the stop string that ended the output, or None.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        """
        Args:
          stop: non-empty strings.
          include_stop: the matched string stays in the text.
        """
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stop)]
        self._by_first_char: dict[str, list[_Pattern]] = {}
        for pattern in self._patterns:
            self._by_first_char.setdefault(pattern.text[0], []).append(pattern)
        self._under_way: list[_Pattern] = []  # those with a non-empty prefix at the end of the text so far
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece of text; returns what is safe to show now.

        Held back is only the longest end of the text that begins a stop string (nothing with `include_stop`, where
        that text is shown in any case). After a match everything is dropped.

        Args:
          armed: False while the output is too short to end: stop strings completed by this piece don't count, then or
            later. One that begins here and is completed by an armed piece does.
        """
        if self.matched is not None:
            return ""
        if not self._patterns:
            return text
        before = len(self._held)
        buffer = self._held + text
        for index, char in enumerate(text):
            complete = self._advance(char)
            if complete is not None and armed:
                self.matched = complete.text
                self._held = ""
                end = before + index + 1
                return buffer[:end] if self._include_stop else buffer[: end - len(complete.text)]
        hold = 0
        if not self._include_stop:
            hold = max((pattern.length for pattern in self._under_way), default=0)
        safe = len(buffer) - hold
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """The output ended for another reason: the text still held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> _Pattern | None:
        """One character further; the longest pattern that it completes."""
        starting = self._by_first_char.get(char)
        if not self._under_way and starting is None:
            return None
        candidates = self._under_way
        if starting is not None:
            candidates = candidates + [pattern for pattern in starting if not pattern.length]
        complete = None
        for pattern in candidates:
            if pattern.advance(char) and (complete is None or len(pattern.text) > len(complete.text)):
                complete = pattern
        self._under_way = [pattern for pattern in candidates if pattern.length]
        return complete


class _Pattern:
    """A stop string and how much of it stands at the end of the text (`length`, always less than the whole)."""

    __slots__ = ("_borders", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._borders = [0, 0]  # of text[:k]: its longest proper prefix that is also its end; grown on demand

    def advance(self, char: str) -> bool:
        """Whether `char` completes the string."""
        text, borders = self.text, self._borders
        length = self.length
        while length and text[length] != char:
            length = borders[length]
        if text[length] == char:
            length += 1
        if length == len(borders):
            border = borders[length - 1]
            while border and text[border] != text[length - 1]:
                border = borders[border]
            borders.append(border + 1 if text[border] == text[length - 1] else 0)
        complete = length == len(text)
        self.length = borders[length] if complete else length
        return complete
