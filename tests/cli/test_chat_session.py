from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import pytest

from jaxserve.cli.chat import printable
from jaxserve.cli.chat_session import ChatSession, ChatSettings, Conversation, Message
from jaxserve.errors import EngineDeadError, InvalidRequestError


@dataclass
class Parrot:
    """Repeats the last message word by word; `before_piece` may interfere."""

    asked: list[list[Message]] = field(default_factory=list)
    closed: int = 0
    before_piece: Callable[[int], None] = lambda index: None

    def stream(self, messages: list[Message], settings: ChatSettings) -> Generator[str]:
        self.asked.append([dict(message) for message in messages])
        try:
            for index, word in enumerate(messages[-1]["content"].split()):
                self.before_piece(index)
                yield word + " "
        finally:
            self.closed += 1


@dataclass
class Screen:
    text: str = ""
    notices: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        self.text += text


def talk(
    parrot: Parrot, *lines: str, system: str | None = None, interactive: bool = True
) -> tuple[Screen, ChatSession]:
    screen = Screen()
    session = ChatSession(
        answerer=parrot,
        settings=ChatSettings(max_tokens=8),
        conversation=Conversation(system=system),
        write=screen.write,
        notice=screen.notices.append,
        interactive=interactive,
    )
    session.run(line + "\n" for line in lines)
    return screen, session


def test_every_answer_builds_on_the_whole_conversation() -> None:
    parrot = Parrot()
    screen, _ = talk(parrot, "one two", "", "   ", "three", system="be brief")
    assert screen.text == "one two \nthree \n"
    assert [message["role"] for message in parrot.asked[-1]] == ["system", "user", "assistant", "user"]
    assert parrot.asked[-1][2]["content"] == "one two "
    assert parrot.closed == 2


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_exit_leaves_and_what_follows_is_not_read(leave: str) -> None:
    parrot = Parrot()
    talk(parrot, "one", leave, "two")
    assert len(parrot.asked) == 1


def test_reset_forgets_the_turns_and_keeps_the_system_prompt() -> None:
    parrot = Parrot()
    talk(parrot, "one", "/reset", "two", system="be brief")
    assert [message["content"] for message in parrot.asked[-1]] == ["be brief", "two"]


@pytest.mark.parametrize(("command", "system"), [("/system  speak Latin ", "speak Latin"), ("/system", None)])
def test_system_replaces_the_system_prompt(command: str, system: str | None) -> None:
    parrot = Parrot()
    talk(parrot, "one", command, "two", system="be brief")
    first = parrot.asked[-1][0]
    assert first == ({"role": "system", "content": system} if system else {"role": "user", "content": "two"})


def test_a_mistyped_command_is_not_sent_to_the_model() -> None:
    parrot = Parrot()
    screen, _ = talk(parrot, "/rset", "hello")
    assert len(parrot.asked) == 1
    assert "/rset" in screen.notices[0]
    assert "/reset" in screen.notices[0]


def test_a_refused_message_is_dropped_and_the_conversation_goes_on() -> None:
    def refuse(index: int) -> None:
        if len(parrot.asked) == 1:
            raise InvalidRequestError("9000 tokens are more than the context holds")

    parrot = Parrot(before_piece=refuse)
    screen, session = talk(parrot, "too long", "short")
    assert screen.notices == ["error: 9000 tokens are more than the context holds"]
    assert [turn["content"] for turn in session.conversation.turns] == ["short", "short "]


@pytest.mark.parametrize(
    ("error", "interactive"),
    [(InvalidRequestError("too long"), False), (EngineDeadError("it has stopped"), True)],
)
def test_what_cannot_be_mended_by_typing_ends_the_session(error: Exception, interactive: bool) -> None:
    def fail(index: int) -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        talk(Parrot(before_piece=fail), "hello", interactive=interactive)


def test_an_error_does_not_follow_in_the_line_of_a_half_answer() -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise EngineDeadError("it has stopped")

    screen = Screen()
    session = ChatSession(
        answerer=Parrot(before_piece=fail),
        settings=ChatSettings(max_tokens=8),
        conversation=Conversation(),
        write=screen.write,
        notice=screen.notices.append,
        interactive=False,
    )
    with pytest.raises(EngineDeadError):
        session.run(["one two"])
    assert screen.text == "one \n"


def test_ctrl_c_stops_one_answer_and_keeps_what_was_said() -> None:
    def interrupt(index: int) -> None:
        if index == 1 and len(parrot.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    parrot = Parrot(before_piece=interrupt)
    screen, session = talk(parrot, "one two three four", "five")
    assert screen.text == "one two \nfive \n"
    assert screen.notices == ["(stopped)"]
    assert [turn["content"] for turn in session.conversation.turns][1:] == ["one two ", "five", "five "]
    assert parrot.closed == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_answer() -> None:
    def interrupt(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    parrot = Parrot(before_piece=interrupt)
    with pytest.raises(KeyboardInterrupt):
        talk(parrot, "one two three")
    assert parrot.closed == 1


@pytest.mark.parametrize("char", ["\x1b", "\x07", "\x08", "\r", "\x7f", "\x9b"])
def test_an_answer_cannot_steer_the_terminal(char: str) -> None:
    assert printable(f"a{char}[2Jb") == "a\ufffd[2Jb"


def test_text_of_every_script_reaches_the_terminal_unchanged() -> None:
    text = "a\tb\nš 中文 עברית \u200d👩\u200d🚀 e\u0301 \u00a0"
    assert printable(text) == text
