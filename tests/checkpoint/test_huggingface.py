"""Safetensors directories: what is sound loads exactly, what is not says so in one line that names the file."""

from __future__ import annotations

import json
import logging
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import (
    assert_same,
    flat_params,
    tiny_config,
    tiny_tensors,
    write_huggingface,
    write_json,
)

NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def refuse(directory, *mentions):
    """Opening or loading fails with one line that holds every mention."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).load_params("float32")
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 16}]
)
def test_loads_every_value(tmp_path, shards, changes):
    config = tiny_config(**changes)
    tensors = write_huggingface(tmp_path / "m", config, shards=shards)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert (checkpoint.kind, checkpoint.name, checkpoint.stored_dtype) == ("huggingface", "m", "float32")
    assert checkpoint.generation.eos_token_ids == (258, 2)
    assert (checkpoint.generation.temperature, checkpoint.generation.top_k) == (0.6, 40)
    assert_same(checkpoint.load_params("float32"), tensors)


@pytest.mark.parametrize("declared", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_the_type_of_the_file_and_what_the_config_says_of_it_never_change_the_model(
    tmp_path, stored, declared
):
    """Values go from the file's type straight to the wanted one; `torch_dtype` has no say, float16 is no stop."""
    config = tiny_config(torch_dtype=declared)
    wide = {name: array * 300 for name, array in tiny_tensors(config).items()}
    held = {name: array.astype(NUMPY_DTYPES[stored]) for name, array in wide.items()}
    write_huggingface(tmp_path, config, tensors=held)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stored_dtype == stored
    for wanted in ("float32", "bfloat16"):
        expected = {name: array.astype(NUMPY_DTYPES[wanted]) for name, array in held.items()}
        params = checkpoint.load_params(wanted)
        assert params["norm"]["scale"].dtype == wanted
        assert_same(params, expected)


@pytest.mark.parametrize("different", [False, True])
def test_a_tied_model_with_a_head_of_its_own_uses_the_embedding(tmp_path, caplog, different):
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    head = tensors["model.embed_tokens.weight"] + (1 if different else 0)
    write_huggingface(tmp_path, config, tensors={**tensors, "lm_head.weight": head})
    with caplog.at_level(logging.WARNING, logger="jaxserve.checkpoint"):
        assert_same(open_checkpoint(tmp_path).load_params("float32"), tensors)
    warned = [record for record in caplog.records if "lm_head.weight" in record.getMessage()]
    assert bool(warned) == different


def test_an_untied_model_needs_its_head(tmp_path):
    config = tiny_config()
    tensors = tiny_tensors(config)
    del tensors["lm_head.weight"]
    write_huggingface(tmp_path, config, tensors=tensors)
    refuse(tmp_path, "model.safetensors", "lm_head.weight is missing")


def test_harmless_extras_are_ignored(tmp_path):
    config = tiny_config()
    tensors = tiny_tensors(config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_huggingface(tmp_path, config, tensors={**tensors, **extra})
    assert_same(open_checkpoint(tmp_path).load_params("float32"), tensors)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["model.layers.1.mlp.up_proj.weight is missing"],
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones((64, 32), np.float32)}),
            ["model.layers.2.mlp.up_proj.weight", "not part of the model"],
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            ["model.norm.weight has shape [31]", "asks for [32]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}),
            ["model.norm.weight", "I8"],
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            ["q_proj.bias", "not part of the model"],
        ),
    ],
)
def test_tensors_must_be_those_of_the_model(tmp_path, change, mentions):
    tensors = tiny_tensors(tiny_config())
    change(tensors)
    write_huggingface(tmp_path, tensors=tensors)
    refuse(tmp_path, "model.safetensors", *mentions)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 5}, {"num_hidden_layers": 1}, {"hidden_size": 64}, {"vocab_size": 300}]
)
def test_another_models_config_lists_differences(tmp_path, changes):
    write_huggingface(tmp_path)
    write_json(tmp_path / "config.json", tiny_config(**changes))
    message = refuse(tmp_path, "config.json")
    assert len(message) < 1000


@pytest.mark.parametrize("where", [1, 4, 12, -1, -1000])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file_is_named(tmp_path, where, shards):
    write_huggingface(tmp_path, shards=shards)
    victim = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = victim.read_bytes()
    victim.write_bytes(content[:where])
    refuse(tmp_path, victim.name, "truncated")


def test_a_missing_shard_is_named(tmp_path):
    write_huggingface(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refuse(tmp_path, "model-00002-of-00003.safetensors", "missing")


def test_a_dangling_link_counts_as_missing(tmp_path):
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refuse(tmp_path, "model.safetensors")


def test_shards_without_their_index(tmp_path):
    write_huggingface(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    refuse(tmp_path, "model.safetensors.index.json is missing")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'],
)
def test_a_damaged_index_is_named(tmp_path, content):
    write_huggingface(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refuse(tmp_path, "model.safetensors.index.json")


def test_an_index_that_is_wrong_about_a_tensor(tmp_path):
    write_huggingface(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    values["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))
    refuse(tmp_path, ".safetensors", "is missing")


def test_a_tensor_in_two_shards(tmp_path):
    tensors = write_huggingface(tmp_path, shards=2)
    name = "model.embed_tokens.weight"
    save_file(
        {"model.norm.weight": tensors["model.norm.weight"], name: tensors[name]}, tmp_path / "x.safetensors"
    )
    shutil.move(tmp_path / "x.safetensors", tmp_path / "model-00002-of-00002.safetensors")
    refuse(tmp_path, "model-00002-of-00002.safetensors", name)


@pytest.mark.parametrize("stray", ["model.safetensors", "model-00004-of-00004.safetensors"])
def test_a_stray_weight_file_is_named(tmp_path, stray):
    tensors = write_huggingface(tmp_path, shards=2)
    save_file(tensors, tmp_path / stray)
    refuse(tmp_path, stray, "stray")


def test_files_of_no_concern_are_left_alone(tmp_path):
    tensors = write_huggingface(tmp_path)
    for name in (
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "._model.safetensors",
        "x.gguf",
    ):
        (tmp_path / name).write_bytes(b"x")
    assert_same(open_checkpoint(tmp_path).load_params("float32"), tensors)


def test_only_pickles(tmp_path):
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "no *.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_one_value_that_is_no_number_stops_the_load(tmp_path, value, wanted):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = tiny_tensors(tiny_config())
    tensors[name][-1, -1] = value
    write_huggingface(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(tmp_path).load_params(wanted)
    assert "model.layers.0" not in str(caught.value)


def test_large_values_are_numbers_even_if_their_sum_is_not(tmp_path):
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][:] = 3e38
    write_huggingface(tmp_path, tensors=tensors)
    assert_same(open_checkpoint(tmp_path).load_params("float32"), tensors)


def test_a_value_that_only_the_wanted_type_cannot_hold_stops_the_load(tmp_path):
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][3] = np.finfo(np.float32).max
    write_huggingface(tmp_path, tensors=tensors)
    assert np.isfinite(
        flat_params(open_checkpoint(tmp_path).load_params("float32"))["model.norm.weight"]
    ).all()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        open_checkpoint(tmp_path).load_params("bfloat16")
