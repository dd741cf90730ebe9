"""Exits on disk: what was written comes back, and what does not fit is refused in one line."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from jaxserve.checkpoint.exit_store import open_exit, write_exit
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.orbax_store import MANIFEST_NAME
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.errors import CheckpointError
from jaxserve.models.exit import exit_bytes, exit_specs
from tests.device.driver import MODEL
from tests.exits import exit_shape, random_exit

SHAPE = exit_shape(MODEL)


@cache
def words(*extra: str) -> TokenizerParts:
    vocab = {word: i for i, word in enumerate(["a", "b", "<s>", *extra])}
    return TokenizerParts(tokenizers.Tokenizer(WordLevel(vocab, unk_token="<s>")), None, None, None)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "exit")


def write(path: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "tokenizer": words(),
        "num_layers": 1,
        "shape": SHAPE,
        "params": random_exit(SHAPE, MODEL.vocab_size),
        "source": {},
        **changes,
    }
    write_exit(path, **arguments)
    return path


def test_what_was_written_comes_back(stored: Path) -> None:
    checkpoint = open_exit(stored, MODEL, words())
    assert (checkpoint.num_layers, checkpoint.shape) == (1, SHAPE)
    written, read = random_exit(SHAPE, MODEL.vocab_size), checkpoint.load_params(jnp.bfloat16)
    num_bytes = 0
    for spec in exit_specs(SHAPE):
        old: Any = written
        new: Any = read
        for key in spec.path:
            old, new = old[key], new[key]
        assert new.dtype == (jnp.int32 if spec.path == ("token_ids",) else jnp.bfloat16)
        assert np.array_equal(old.astype(new.dtype), new)
        num_bytes += new.nbytes
    assert checkpoint.param_bytes(2) == exit_bytes(exit_specs(SHAPE), 2) == num_bytes


def test_it_takes_the_place_of_another_exit(stored: Path) -> None:
    write(stored, num_layers=2, params=random_exit(SHAPE, MODEL.vocab_size, seed=1))
    checkpoint = open_exit(stored, MODEL, words())
    assert checkpoint.num_layers == 2
    expected = random_exit(SHAPE, MODEL.vocab_size, seed=1)["token_ids"]
    assert np.array_equal(checkpoint.load_params(jnp.float32)["token_ids"], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "is an exit of another model, tiny, which has num_layers 2 (here 3)"),
        ({"hidden_size": 64}, "is an exit of another model, tiny, which has hidden_size 32 (here 64)"),
        ({"vocab_size": 300}, "is an exit of another model, tiny, which has vocab_size 256 (here 300)"),
    ],
)
def test_another_model(stored: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_exit(stored, dataclasses.replace(MODEL, **changes), words())
    assert str(error.value) == f"{stored}: {message}"


def test_another_vocabulary(stored: Path) -> None:
    with pytest.raises(CheckpointError, match="another model, tiny, which has other words in its vocabulary"):
        open_exit(stored, MODEL, words("c"))


def test_no_exit_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder; scripts/train_draft makes exits"):
        open_exit(tmp_path / "nowhere", MODEL, words())
    with pytest.raises(CheckpointError, match="holds no exit"):
        open_exit(tmp_path, MODEL, words())


def test_a_model_is_no_exit_and_an_exit_no_model(tiny_checkpoint_dir: Path, stored: Path) -> None:
    with pytest.raises(CheckpointError, match="is the model tiny, and no exit of one"):
        open_exit(tiny_checkpoint_dir, MODEL, words())
    with pytest.raises(CheckpointError, match="holds a model; choose another destination"):
        write(tiny_checkpoint_dir)
    with pytest.raises(
        CheckpointError, match="is an exit and no model; its model takes it as --speculative exit:"
    ):
        open_checkpoint(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["shape"].pop("inner_size"), "damaged manifest"),
        (lambda config: config.pop("target"), "damaged manifest"),
        (lambda config: config.update(num_layers=9), "its own shape does not fit"),
        (lambda config: config["shape"].update(num_tokens=32), "has shape"),
    ],
)
def test_a_damaged_manifest(stored: Path, change: Any, message: str) -> None:
    manifest = json.loads((stored / MANIFEST_NAME).read_text())
    change(manifest["config"])
    (stored / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        open_exit(stored, MODEL, words())


def test_tokens_that_the_vocabulary_has_not(tmp_path: Path) -> None:
    params = random_exit(SHAPE, MODEL.vocab_size)
    for token_ids in (params["token_ids"] + MODEL.vocab_size, params["token_ids"][::-1]):
        path = write(tmp_path / "exit", params={**params, "token_ids": token_ids})
        with pytest.raises(CheckpointError, match="token_ids are not ascending ids of the vocabulary"):
            open_exit(path, MODEL, words()).load_params(jnp.float32)
