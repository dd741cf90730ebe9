"""One call's JSON object, read character by character."""

from __future__ import annotations

import enum
from collections.abc import Collection

WHITESPACE = " \t\n\r"
_ARGUMENT_KEYS = ("arguments", "parameters")
_FIRST_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")


class Step(enum.Enum):
    """What a character did."""

    MORE = "more"  # it belongs to the object
    END = "end"  # it closed the object
    REFUSED = "refused"  # the object can't go on like that; the character has not been taken


class _State(enum.Enum):
    BEGIN = enum.auto()
    FIRST_KEY = enum.auto()  # or the end of an empty object
    NEXT_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    OTHER = enum.auto()  # the value of another key
    LITERAL = enum.auto()  # ... that is a number, true, false or null
    AFTER_VALUE = enum.auto()


class CallObjectReader:
    """Reads `{"name": NAME, "arguments": {...}}`, keys in any order, further ones skipped.

    It is strict until the name of an offered function and the beginning of the arguments are there (`is_call`).
    From then on it only counts brackets: what the model writes as arguments is handed on as it is.

    Attributes:
      name: once it has been read.
      arguments_ended: the arguments are complete.
    """

    def __init__(self, names: Collection[str], stop: str = "") -> None:
        """
        Args:
          names: of the functions that may be called.
          stop: a character that never stands in JSON outside of strings, and ends broken arguments.
        """
        self._names = names
        self._stop = stop
        self._state = _State.BEGIN
        self._text = ""  # of the key or name under way
        self._key: str | None = None
        self._nesting = _Nesting()
        self._arguments: list[str] | None = None
        self.name: str | None = None
        self.arguments_ended = False

    @property
    def is_call(self) -> bool:
        """Name and beginning of the arguments are known, so it will be a call, whatever follows."""
        return self.name is not None and self._arguments is not None

    def take_arguments(self) -> str:
        """Characters of the arguments that have come since the last time."""
        new = "".join(self._arguments or ())
        if new:
            self._arguments = []
        return new

    def take(self, char: str) -> Step:
        """The next character."""
        match self._state:
            case _State.ARGUMENTS:
                return self._take_argument(char)
            case _State.NAME:
                return self._take_name(char)
            case _State.KEY:
                return self._take_key(char)
            case _State.OTHER:
                if self._nesting.take(char):
                    self._state = _State.AFTER_VALUE
                return Step.MORE
            case _State.LITERAL if char not in ",}" and char not in WHITESPACE:
                return Step.MORE
            case _:
                return self._take_structure(char)

    def _take_structure(self, char: str) -> Step:
        state = self._state
        if state is not _State.BEGIN and char in WHITESPACE:
            if state is _State.LITERAL:
                self._state = _State.AFTER_VALUE
            return Step.MORE
        match state, char:
            case _State.BEGIN, "{":
                self._state = _State.FIRST_KEY
            case ((_State.FIRST_KEY | _State.NEXT_KEY), '"'):
                self._text = ""
                self._nesting = _Nesting(char)
                self._state = _State.KEY
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.VALUE, _:
                return self._begin_value(char)
            case ((_State.AFTER_VALUE | _State.LITERAL), ","):
                self._state = _State.NEXT_KEY
            case ((_State.AFTER_VALUE | _State.LITERAL), "}") if self.name is not None:
                if self._arguments is None:  # a function without any, called without any
                    self._arguments = ["{}"]
                    self.arguments_ended = True
                return Step.END
            case _:
                return Step.REFUSED
        return Step.MORE

    def _take_key(self, char: str) -> Step:
        is_first = self._key is None
        if self._nesting.take(char):
            if is_first and self._text not in _FIRST_KEYS:
                return Step.REFUSED
            self._key = self._text
            self._state = _State.COLON
            return Step.MORE
        text = self._text + char
        if char < " " or (is_first and not any(key.startswith(text) for key in _FIRST_KEYS)):
            return Step.REFUSED
        self._text = text
        return Step.MORE

    def _begin_value(self, char: str) -> Step:
        if self._key == "name":
            if char != '"' or self.name is not None:
                return Step.REFUSED
            self._text = ""
            self._state = _State.NAME
        elif self._key in _ARGUMENT_KEYS:
            if char != "{" or self._arguments is not None:
                return Step.REFUSED
            self._arguments = [char]
            self._nesting = _Nesting(char)
            self._state = _State.ARGUMENTS
        elif char in '{["':
            self._nesting = _Nesting(char)
            self._state = _State.OTHER
        elif char.isalnum() or char == "-":
            self._state = _State.LITERAL
        else:
            return Step.REFUSED
        return Step.MORE

    def _take_name(self, char: str) -> Step:
        if char == '"':
            if self._text not in self._names:
                return Step.REFUSED
            self.name = self._text
            self._state = _State.AFTER_VALUE
            return Step.MORE
        text = self._text + char
        if not any(name.startswith(text) for name in self._names):
            return Step.REFUSED
        self._text = text
        return Step.MORE

    def _take_argument(self, char: str) -> Step:
        if char == self._stop and not self._nesting.in_string:
            return Step.REFUSED
        assert self._arguments is not None
        self._arguments.append(char)
        if self._nesting.take(char):
            self.arguments_ended = True
            self._state = _State.AFTER_VALUE
        return Step.MORE


class _Nesting:
    """Where a JSON value that begins with `{`, `[` or a quote ends."""

    def __init__(self, first: str = "") -> None:
        self.in_string = first == '"'
        self._depth = 1 if first in ("{", "[") else 0
        self._escaped = False

    def take(self, char: str) -> bool:
        """Whether `char` is the value's last one."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
                return not self._depth
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return not self._depth
        return False
