from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import engine_factory
from jaxserve.cli.main import run
from tests.checkpoint.tiny_files import write_huggingface


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("tokenizer.json", None),
        ("tokenizer.json", b'{"version": "1.0", '),
        ("generation_config.json", b"["),
        ("chat_template.jinja", b"{% for message in messages %}"),
        ("model.safetensors", b"\x08"),
    ],
)
def test_a_damaged_model_is_one_line_before_the_port_opens(
    name: str,
    content: bytes | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B195: and nobody is kept waiting on a port behind which nothing will come."""
    model = tmp_path / "model"
    write_huggingface(model)
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    create_engine = engine_factory.create_engine

    def knock_and_create(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        return create_engine(*args, **kwargs)

    monkeypatch.setattr(engine_factory, "create_engine", knock_and_create)
    assert run(["serve", "--model", str(model), "--port", str(port)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert (name if name != "chat_template.jinja" else "chat template") in printed.err
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
