"""Which path is which kind of model, and what is said about those that are none."""

from __future__ import annotations

import pytest

from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import write_gguf, write_huggingface


@pytest.mark.parametrize("name", ["nowhere", "smollm3", "a/b", "x" * 5000])
def test_a_path_that_does_not_exist_lists_the_known_names(tmp_path, name):
    for attempt in (lambda: open_checkpoint(tmp_path / name), lambda: resolve_model(name, store=tmp_path)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert len(name) > 1000 or "smollm2" in str(caught.value)


def test_a_path_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_huggingface(tmp_path / "smollm2")
    assert resolve_model("smollm2", store=tmp_path / "store") == (tmp_path / "smollm2").relative_to(tmp_path)
    assert resolve_model(str(tmp_path), store=tmp_path / "store") == tmp_path


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model"):
        open_checkpoint(tmp_path)


def test_one_file_of_a_directory(tmp_path):
    write_huggingface(tmp_path)
    with pytest.raises(CheckpointError, match="give the directory"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"GG", b"{}", bytes(100)])
def test_a_file_that_is_no_model(tmp_path, content):
    (tmp_path / "file.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.bin"):
        open_checkpoint(tmp_path / "file.bin")


def test_strings_and_relative_paths(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("m.gguf").name == "m"
    write_huggingface(tmp_path / "named")
    monkeypatch.chdir(tmp_path / "named")
    assert open_checkpoint(".").name == "named"


def test_progress_is_reported_to_the_end(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    seen = []
    open_checkpoint(tmp_path / "m.gguf").load_params("float32", progress=lambda *step: seen.append(step))
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] > 0
