"""The real command, in-process and against a real server, with input from a pipe."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import assert_refused, command_environment, run_jaxserve
from tests.server_process import ServerProcess

GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.fixture(scope="module")
def local_answers(tiny_checkpoint_dir: Path) -> str:
    result = run_jaxserve("chat", "--model", tiny_checkpoint_dir, *GREEDY, stdin="Hello\nAnd now?\n")
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server(tiny_checkpoint_dir: Path, local_answers: str) -> Iterator[ServerProcess]:
    # The settings of a chat in process, so that it finds the programs that the one above has compiled.
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "128")
    with ServerProcess(tiny_checkpoint_dir, *flags, start_timeout_s=900) as running:
        assert "compiling again" not in running.logs
        yield running


def test_every_line_of_a_pipe_is_answered(local_answers: str) -> None:
    assert local_answers.endswith("\n")
    assert len(local_answers.strip()) > 2


def test_a_server_gives_the_same_answers_as_the_model_in_process(
    server: ServerProcess, local_answers: str
) -> None:
    result = run_jaxserve("chat", "--url", server.base_url, *GREEDY, stdin="Hello\nAnd now?\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == local_answers


def test_a_seed_makes_answers_repeatable_and_different_seeds_differ(server: ServerProcess) -> None:
    def answer(seed: int) -> str:
        options = ("--temperature", "1", "--seed", str(seed), "--max-tokens", "12")
        return run_jaxserve("chat", "--url", server.base_url, *options, stdin="Hello\n").stdout

    assert answer(1) == answer(1) != answer(2)


def test_commands_and_blank_lines_are_not_sent(server: ServerProcess) -> None:
    one = run_jaxserve("chat", "--url", server.base_url, *GREEDY, stdin="Hello\n")
    script = "\n/system be brief\n\n/system\nHello\n/exit\nnever sent\n"
    same = run_jaxserve("chat", "--url", server.base_url, *GREEDY, stdin=script)
    assert same.stdout == one.stdout


def test_bytes_that_are_no_utf8_and_lone_surrogates_do_not_end_it(server: ServerProcess) -> None:
    """The second line holds a surrogate in UTF-8's manner, which no decoder accepts."""
    result = run_jaxserve(
        "chat", "--url", server.base_url, *GREEDY, stdin=b"\xff\xfe?\n\xed\xa0\x80\nHello\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_terminal_that_cannot_spell_the_answer_does_not_end_it(server: ServerProcess) -> None:
    result = run_jaxserve(
        "chat", "--url", server.base_url, *GREEDY, stdin="Hello\n", environment={"PYTHONIOENCODING": "ascii"}
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("where", ["--url", "--model"])
def test_a_message_beyond_the_context_fails_in_one_line(
    server: ServerProcess, tiny_checkpoint_dir: Path, where: str
) -> None:
    target = server.base_url if where == "--url" else str(tiny_checkpoint_dir)
    result = run_jaxserve("chat", where, target, *GREEDY, stdin="word " * 5000 + "\n")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_model_that_the_server_has_not_is_refused(server: ServerProcess) -> None:
    assert_refused(run_jaxserve("chat", "--url", server.base_url, "--model", "gpt-9", stdin="Hi\n"), "gpt-9")


def test_at_a_terminal_ctrl_c_stops_an_answer_and_the_next_is_given(server: ServerProcess) -> None:
    """A pseudo-terminal: prompts appear, the answer grows, Ctrl-C stops it, /exit ends with code 0."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "chat", "--url", server.base_url, "--max-tokens", "900"],
        env={**command_environment(), "TERM": "dumb"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    seen = bytearray()

    def read_until(text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, bytes(seen)
            seen.extend(os.read(master, 4096))

    try:
        read_until(b"> ")
        os.write(master, b"Count\n")
        read_until(b"Count")
        seen.clear()
        while len(seen) < 200:  # the answer is on its way
            seen.extend(os.read(master, 4096))
        process.send_signal(signal.SIGINT)
        read_until(b"(stopped)")
        read_until(b"> ")
        os.write(master, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
