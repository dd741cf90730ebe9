from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.main import run


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_one_line_before_the_model_is_looked_at(
    taken_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--model", str(tmp_path / "missing"), "--port", str(taken_port)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"port {taken_port}" in printed.err


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("--port", "70000"), "--port"),
        (("--api-key", ""), "--api-key"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--dtype", "int4"), "--dtype"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--allowed-origins", "https://example.org/path"), "example.org"),
        (("--allowed-origins", "example.org"), "example.org"),
        (("--ssl-keyfile", "/nowhere/key"), "--ssl-certfile"),
        (("--ssl-certfile", "/nowhere/certificate"), "/nowhere/certificate"),
        (("--drain-seconds", "-1"), "--drain-seconds"),
        (("--port", "0"), "missing"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], mention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--model", str(tmp_path / "missing"), *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert mention in printed.err
