"""An output's text to content and tool calls, while it is being written."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from jaxserve.tool_calls.call_object import WHITESPACE, CallObjectReader, Step
from jaxserve.tool_calls.deltas import ParsedText, ToolCallDelta
from jaxserve.tool_calls.tool_format import ListUse, ToolFormat


class _State(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # behind an opening
    IN_LIST = enum.auto()  # behind the list's bracket
    NEXT_OBJECT = enum.auto()  # behind what separates two objects
    OBJECT = enum.auto()
    AFTER_OBJECT = enum.auto()
    AFTER_LIST = enum.auto()
    CLOSING = enum.auto()  # in the middle of it


class ToolCallParser:
    """Reads one output. Deltas joined are the same however the text is cut into pieces.

    * A call is one as soon as its frame, the name of an offered function and the beginning of its arguments have
      come. The characters of its arguments are then handed on as they come, be they valid JSON or not.
    * What begins like a call and turns out not to be one, or is broken off before it is, is content, its frame
      included. So is everything behind a call that does not fit into its frame. Of texts that are not calls no
      character is lost.
    * White space between calls, around them at the ends of the output, and inside of frames is dropped.

    Work is in proportion to the characters read.

    Attributes:
      num_calls: calls begun so far.
      has_broken_call: the arguments of a call have not come to their end.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        make_id: Callable[[], str],
        *,
        max_calls: int | None = None,
    ) -> None:
        """
        Args:
          names: of the functions that may be called.
          make_id: a new call's id.
          max_calls: further calls are left out.
        """
        self._format = tool_format
        self._names = names
        self._make_id = make_id
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._buffer = ""  # text not yet looked at, or that may yet be an opening
        self._held: list[str] = []  # characters of a frame: syntax if it goes on well, else content
        self._at_edge = True  # nothing but white space since the output's beginning, or since a call
        self._in_list = False
        self._reader = CallObjectReader(names)
        self._parsed = ParsedText()
        self.num_calls = 0
        self.has_broken_call = False

    def feed(self, text: str) -> ParsedText:
        """The next piece of text; what is certain by now."""
        self._buffer += text
        while self._buffer and (self._scan_text() if self._state is _State.TEXT else self._scan_frame()):
            pass
        return self._give()

    def finish(self) -> ParsedText:
        """The output has ended: the rest."""
        match self._state:
            case _State.TEXT:
                if not (self.num_calls and self._at_edge and _is_blank(self._buffer)):
                    self._parsed.content += self._buffer
                self._buffer = ""
            case _State.OBJECT if self._reader.is_call:
                self.has_broken_call |= not self._reader.arguments_ended
            case _State.OPENED | _State.IN_LIST | _State.NEXT_OBJECT | _State.OBJECT:
                self._parsed.content += "".join(self._held)
        self._held = []
        return self._give()

    def _give(self) -> ParsedText:
        parsed, self._parsed = self._parsed, ParsedText()
        return parsed

    def _scan_text(self) -> bool:
        """Whether there is more to look at."""
        buffer, opening = self._buffer, self._format.opening
        if self._at_edge and self._format.begins_bare and not self.num_calls:
            blank = len(buffer) - len(buffer.lstrip(WHITESPACE))
            if buffer[blank : blank + 1] == "{":
                self._held, self._buffer = [buffer[:blank]], buffer[blank:]
                self._begin_object()
                return True
        found = buffer.find(opening)
        if found >= 0:
            before = buffer[:found]
            if not (self._at_edge and _is_blank(before)):
                self._parsed.content += before
                before = ""
            self._held, self._buffer = [before + opening], buffer[found + len(opening) :]
            self._state, self._at_edge, self._in_list = _State.OPENED, False, False
            return True
        certain = len(buffer) - _overlap(buffer, opening)
        if self._at_edge and _is_blank(buffer[:certain]):
            return False
        self._at_edge = False
        self._parsed.content += buffer[:certain]
        self._buffer = buffer[certain:]
        return False

    def _scan_frame(self) -> bool:
        """Characters of the buffer until one leads back to text; whether there is more to look at."""
        text, self._buffer = self._buffer, ""
        for index, char in enumerate(text):
            is_taken = self._take(char)
            if self._state is _State.TEXT:
                self._buffer += text[index + is_taken :]
                return True
        return False

    def _take(self, char: str) -> bool:
        """Whether the character has been taken; if not, it is text."""
        if self._state is _State.OBJECT:
            return self._take_of_object(char)
        if self._state is _State.CLOSING:
            return self._take_of_closing(char)
        if char in WHITESPACE:
            self._held.append(char)
            return True
        lists, closing = self._format.lists, self._format.closing
        match self._state, char:
            case _State.OPENED, "[" if lists is not ListUse.NEVER:
                self._in_list = True
                return self._hold(char, _State.IN_LIST)
            case _State.OPENED, "{" if lists is not ListUse.ALWAYS:
                return self._begin_object(char)
            case ((_State.IN_LIST | _State.NEXT_OBJECT), "{"):
                return self._begin_object(char)
            case ((_State.IN_LIST | _State.AFTER_OBJECT), "]") if self._in_list:
                self._hold(char, _State.AFTER_LIST)
                return self._end_frame() if not closing else True
            case _State.AFTER_OBJECT, "," if self._in_list:
                return self._hold(char, _State.NEXT_OBJECT)
            case _State.AFTER_OBJECT, ";" if self._format.begins_bare:
                return self._hold(char, _State.NEXT_OBJECT)
            case _State.AFTER_OBJECT, "{" if self._format.begins_bare:
                return self._begin_object(char)
            case ((_State.AFTER_OBJECT | _State.AFTER_LIST), _) if closing and char == closing[0]:
                self._held.append("")  # where the closing begins
                return self._hold(char, _State.CLOSING)
            case _State.AFTER_OBJECT | _State.AFTER_LIST, _:
                return self._back_to_text()
        return self._reject()

    def _take_of_object(self, char: str) -> bool:
        reader = self._reader
        was_call = reader.is_call
        step = reader.take(char)
        if step is Step.REFUSED:
            return self._refuse_object(char)
        self._held.append(char)
        if reader.is_call:
            arguments = reader.take_arguments()
            if not was_call:
                self._parsed_call(ToolCallDelta(self.num_calls, self._make_id(), reader.name, arguments))
                self.num_calls += 1
                self._held = []
            elif arguments:
                self._parsed_call(ToolCallDelta(self.num_calls - 1, arguments=arguments))
                self._held = []
        if step is Step.END:
            self._held = []
            self._state = _State.AFTER_OBJECT
        return True

    def _refuse_object(self, char: str) -> bool:
        if not self._reader.is_call:
            return self._reject()
        self.has_broken_call |= not self._reader.arguments_ended
        if not _is_blank("".join(self._held)):
            return self._back_to_text()
        self._state = _State.AFTER_OBJECT  # without the object's own bracket
        return self._take(char)

    def _take_of_closing(self, char: str) -> bool:
        closing = self._format.closing
        at = len(self._held) - 1 - max(i for i, piece in enumerate(self._held) if not piece)
        if closing[at] != char:
            return self._back_to_text()
        self._held.append(char)
        return self._end_frame() if at + 1 == len(closing) else True

    def _begin_object(self, char: str = "") -> bool:
        self._reader = CallObjectReader(self._names, self._format.closing[:1])
        self._state = _State.OBJECT
        self._at_edge = False
        return self._take_of_object(char) if char else True

    def _hold(self, char: str, state: _State) -> bool:
        self._held.append(char)
        self._state = state
        return True

    def _end_frame(self) -> bool:
        self._held = []
        self._state, self._at_edge = _State.TEXT, True
        return True

    def _reject(self) -> bool:
        """What is held was no call."""
        self._parsed.content += "".join(self._held)
        self._held = []
        self._state = _State.TEXT
        return False

    def _back_to_text(self) -> bool:
        """The frame does not go on; what is held is text behind its calls, or behind an opening without any."""
        held, self._held = self._held, []
        self._state, self._at_edge = _State.TEXT, True
        if held and held[0].endswith(self._format.opening):
            self._parsed.content += held.pop(0)
            self._at_edge = False
        self._buffer = "".join(held)
        return False

    def _parsed_call(self, delta: ToolCallDelta) -> None:
        if self._max_calls is not None and delta.index >= self._max_calls:
            return
        calls = self._parsed.calls
        if calls and calls[-1].index == delta.index:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)


def _is_blank(text: str) -> bool:
    return not text.strip(WHITESPACE)


def _overlap(text: str, opening: str) -> int:
    """How many characters at the end of `text` are a beginning of `opening`."""
    for size in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:size]):
            return size
    return 0
