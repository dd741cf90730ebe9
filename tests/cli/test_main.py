from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from tests.cli.command import assert_refused, command_environment, run_jaxserve

COMMANDS = ("serve", "chat", "batch", "pull", "convert")


def test_help_names_every_command_and_says_what_a_model_is() -> None:
    result = run_jaxserve("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w+", result.stdout, re.MULTILINE), command
    for text in ("smollm2", ".gguf", "Hugging Face"):
        assert text in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_of_a_command_explains_its_options_and_gives_examples(command: str, flag: str) -> None:
    result = run_jaxserve(command, flag)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(rf"^ +jaxserve {command}", result.stdout.partition("Usage:")[2].partition("\n")[2], re.M)
    # Layout of an example survives, and every option has words beside it.
    options = re.findall(r"^  (--?[\w-]+[^\n]*)\n(?: {3,}(\S[^\n]*))?", result.stdout, re.MULTILINE)
    assert options
    for line, continued in options:
        assert re.search(r"\S {2,}\S", line) or continued, line


def test_without_a_command_it_shows_the_help_and_fails() -> None:
    result = run_jaxserve()
    assert result.returncode == 2
    assert "serve" in result.stdout


def test_version() -> None:
    assert run_jaxserve("--version").stdout == f"jaxserve {jaxserve.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["pull", "--list"], ["chat", "--nonsense"]]
)
def test_what_needs_no_model_loads_no_jax(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "jaxserve", *arguments]
    result = subprocess.run(command, env=command_environment(), capture_output=True, text=True, timeout=120)
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE))
    assert "jaxserve.cli.main" in imported
    assert not imported & {"jax", "jaxlib", "transformers", "orbax", "aiohttp", "flax"}


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["frobnicate"], ["frobnicate", "jaxserve --help"]),
        (["--frobnicate"], ["--frobnicate"]),
        *[
            ([command, "--frobnicate"], ["--frobnicate", f"jaxserve {command} --help"])
            for command in COMMANDS
        ],
        (["pull", "smollm2", "extra"], ["extra"]),
        (["convert"], ["source"]),
        (["batch"], ["INPUT"]),
        (["serve", "--model", "smollm2", "--port", "http"], ["--port", "jaxserve serve --help"]),
        (["chat", "--max-tokens", "0"], ["--max-tokens"]),
        (["chat", "--max-tokens", "many"], ["--max-tokens"]),
        (["chat", "--temperature", "nan"], ["temperature"]),
        (["chat", "--top-p", "1.5"], ["top_p", "1.5"]),
    ],
)
def test_a_bad_command_line_is_one_line_and_code_2(arguments: list[str], mentions: list[str]) -> None:
    assert_refused(run_jaxserve(*arguments), *mentions)


@pytest.mark.parametrize("command", [["serve", "--model"], ["chat", "--model"], ["convert"]])
def test_a_model_that_is_not_there_is_one_line_and_code_2(command: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "no such model")
    rest = [str(tmp_path / "out")] if command == ["convert"] else []
    assert_refused(run_jaxserve(*command, missing, *rest, stdin="hello\n"), "no such model")


def test_debugging_shows_where_an_error_came_from() -> None:
    result = run_jaxserve("chat", "--url", "nonsense", environment={"JAXSERVE_DEBUG": "1"})
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_ctrl_c_ends_with_code_130_and_no_traceback() -> None:
    """Sent while it waits for a server that accepts and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "chat", "--url", url],
            env=command_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    """`jaxserve ... | head -0`"""
    read_end, write_end = socket.socketpair()
    read_end.close()
    with write_end:
        command = [sys.executable, "-m", "jaxserve", "--help"]
        result = subprocess.run(
            command,
            env=command_environment(),
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert "Traceback" not in result.stderr
    assert result.returncode != 0
