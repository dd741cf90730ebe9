"""The conversation loop of `jaxserve chat`: reads messages, streams answers, obeys commands. Knows no model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from jaxserve.errors import InvalidRequestError, JaxserveError
from jaxserve.request import SamplingParams

COMMANDS = "/system TEXT sets the system prompt, /reset forgets the conversation, /exit leaves"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are sampled; None leaves the choice to the model's own defaults."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raises InvalidRequestError where a value is out of range, before a model is loaded for nothing."""
        SamplingParams(**self.as_fields())

    def as_fields(self) -> dict[str, Any]:
        """Those that were chosen, under the names that the HTTP API and `SamplingParams` share."""
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


class Answerer(Protocol):
    """Continues a conversation, piece by piece. Closing the generator ends the answer early.

    Raises InvalidRequestError for a conversation that can't be continued (too long, for example), and another
    JaxserveError where no later one can be either.
    """

    def stream(self, messages: list[Message], settings: ChatSettings) -> Generator[str]: ...


@dataclass(slots=True)
class Conversation:
    """What has been said. Answers that were interrupted stay as far as they came."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        start = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*start, *self.turns]


@dataclass(slots=True)
class ChatSession:
    """Attributes:
    write: puts text on the screen at once.
    notice: shows a line that is not part of an answer.
    interactive: a person is typing: a refused message is shown and the conversation goes on. Otherwise it is an
      error that ends the session, so that scripts notice.
    """

    answerer: Answerer
    settings: ChatSettings
    conversation: Conversation
    write: Callable[[str], None]
    notice: Callable[[str], None]
    interactive: bool

    def run(self, lines: Iterable[str]) -> None:
        """Answer every line until they end or one of them is /exit."""
        for line in lines:
            text = line.strip()
            if not text:
                continue
            if text.startswith("/"):
                if not self._command(text):
                    return
            else:
                self._answer(text)

    def _command(self, text: str) -> bool:
        """Whether the conversation goes on."""
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.conversation.turns.clear()
            self.notice("the conversation starts afresh")
        elif name == "/system":
            self.conversation.system = rest.strip() or None
            self.conversation.turns.clear()
            self.notice(
                "system prompt set; the conversation starts afresh" if rest else "no system prompt any more"
            )
        else:
            self.notice(f"{name}: unknown command; {COMMANDS}")
        return True

    def _answer(self, text: str) -> None:
        turns = self.conversation.turns
        turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            stream = self.answerer.stream(self.conversation.messages(), self.settings)
            with _first_interrupt_noted() as interrupted, closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    self.write(piece)
                    if interrupted():
                        break
        except InvalidRequestError as error:
            turns.pop()
            if not self.interactive:
                raise
            self.notice(f"error: {error}")
            return
        except JaxserveError:
            if pieces:  # the error has a line of its own
                self.write("\n")
            raise
        self.write("\n")
        if interrupted():
            self.notice("(stopped)")
        turns.append({"role": "assistant", "content": "".join(pieces)})


@contextmanager
def _first_interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C is only noted, because a step of the engine must not be torn apart; a second one
    raises KeyboardInterrupt as ever."""
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
