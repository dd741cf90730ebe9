from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.api_keys import make_api_keys, read_key_file
from jaxserve.server.app import ServerOptions
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

BODY = {"model": "copy", "prompt": "Hello world", "max_tokens": 3}
COMPLETIONS = "/v1/completions"


def test_a_file_names_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may\n\nalice: k1: with colon \n  bob:k2\n")
    path.chmod(0o600)
    named = read_key_file(path)
    assert named == [("alice", "k1: with colon"), ("bob", "k2")]
    assert not caplog.text
    path.chmod(0o644)
    read_key_file(path)
    assert "other users" in caplog.text
    keys = make_api_keys(named)
    assert (keys.name_of("k2"), keys.name_of("k1"), keys.name_of("")) == ("bob", None, None)
    assert "k2" not in repr(keys)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "hunter2", "al ice: hunter2", "a/b: hunter2", "x: ", ": k"]
)
def test_a_bad_file_is_told_without_its_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert "hunter2" not in str(caught.value)


def test_keys_and_names_are_unique_and_the_file_must_be_there(tmp_path: Path) -> None:
    for named in ([("a", "k"), ("b", "k")], [("a", "k"), ("a", "l")]):
        with pytest.raises(ConfigError):
            make_api_keys(named)
    with pytest.raises(ConfigError):
        read_key_file(tmp_path / "missing")


@pytest.fixture
def locked(tokenizer: Tokenizer) -> Iterator[tuple[CopyEngine, str]]:
    core = CopyEngine(tokenizer)
    keys = make_api_keys([("alice", "k1"), ("bob", "k2")])
    with RunningServer(core, ServerOptions(keys=keys)) as server:
        yield core, server.base_url


def usage(url: str, kind: str, key: str) -> float:
    lines = http.request(url, "GET", "/metrics").body.decode().splitlines()
    wanted = f'jaxserve:key_{kind}_total{{key="{key}",model_name="copy"}} '
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


def test_each_key_opens_and_is_counted_under_its_name(locked: tuple[CopyEngine, str]) -> None:
    _, url = locked
    assert http.post(url, COMPLETIONS, BODY, headers={"Authorization": "Bearer k1"}).status == 200
    assert http.post(url, COMPLETIONS, BODY, headers={"X-Api-Key": "k2"}).status == 200
    http.stream(url, COMPLETIONS, {**BODY, "n": 2}, headers={"Authorization": "Bearer k2"})
    assert http.post(url, COMPLETIONS, BODY, headers={"Authorization": "Bearer k3"}).status == 401
    assert http.post(url, COMPLETIONS, BODY, headers={"X-Api-Key": "k3"}).status == 401
    assert [usage(url, "requests", key) for key in ("alice", "bob")] == [1, 2]
    assert [usage(url, "generation_tokens", key) for key in ("alice", "bob")] == [3, 9]
    assert usage(url, "prompt_tokens", "bob") == 2 * usage(url, "prompt_tokens", "alice") > 0
    assert b"k1" not in http.request(url, "GET", "/metrics").body
