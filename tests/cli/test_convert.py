from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from tests.cli.command import assert_refused, run_jaxserve


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_hugging_face_directory_becomes_a_store_with_the_same_weights(
    tiny_huggingface_dir: Path, tmp_path: Path, dtype: str | None
) -> None:
    destination = tmp_path / "deep" / "store"
    options = [] if dtype is None else ["--dtype", dtype]
    result = run_jaxserve("convert", tiny_huggingface_dir, destination, *options)
    assert (result.returncode, result.stdout) == (0, f"{destination}\n"), result.stderr
    assert "\x1b" not in result.stderr  # plain lines, no bars: nobody is watching
    made, source = open_checkpoint(destination), open_checkpoint(tiny_huggingface_dir)
    assert (made.kind, made.stored_dtype) == ("orbax", dtype or "float32")
    assert made.config == source.config
    wanted = source.load_params("float32")["embed_tokens"]["embedding"]
    np.testing.assert_allclose(
        made.load_params("float32")["embed_tokens"]["embedding"], wanted, rtol=0 if dtype is None else 2**-8
    )


def test_a_fault_in_the_source_is_one_line_and_leaves_nothing(
    tiny_huggingface_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_huggingface_dir.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    result = run_jaxserve("convert", broken, tmp_path / "store")
    assert_refused(result, "model.safetensors")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", ["int8", "float64", ""])
def test_a_type_that_a_store_cannot_have_is_refused(
    tiny_huggingface_dir: Path, tmp_path: Path, dtype: str
) -> None:
    result = run_jaxserve("convert", tiny_huggingface_dir, tmp_path / "store", "--dtype", dtype)
    assert_refused(result, "dtype", "bfloat16")
