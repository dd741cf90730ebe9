"""GGUF files: every tensor type, the row order of q and k, metadata, and files that are not whole."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.gguf_rope import llama3_rope_factors
from jaxserve.config import RopeConfig
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import (
    TINY_CONFIG,
    assert_same,
    flat_params,
    tiny_config,
    tiny_tensors,
    write_gguf,
    write_huggingface,
)

Q = gguf.GGMLQuantizationType


def refuse(path, *mentions):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).load_params("float32")
    message = str(caught.value)
    assert "\n" not in message
    for mention in (path.name, *mentions):
        assert mention in message


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_every_type_loads_as_its_dequantised_values(tmp_path, kind):
    types = {name: kind for name, array in tiny_tensors(TINY_CONFIG).items() if array.ndim == 2}
    held = write_gguf(tmp_path / "m.gguf", types=types)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.stored_dtype == {Q.F16: "float16", Q.BF16: "bfloat16"}.get(kind, "float32")
    assert_same(checkpoint.load_params("float32"), held)


# Where a block's float16 scales lie: without plausible ones, random blocks would dequantise to infinity.
@pytest.mark.parametrize(
    ("kind", "scales"),
    [(Q.Q2_K, (80, 82)), (Q.Q3_K, (108,)), (Q.Q4_K, (0, 2)), (Q.Q5_K, (0, 2)), (Q.Q6_K, (208,))],
)
def test_k_quants(tmp_path, kind, scales):
    rng = np.random.default_rng(0)
    config = tiny_config(intermediate_size=256)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (32, size), dtype=np.uint8)  # 32 rows of one block of 256 values
    for offset in scales:
        blocks[:, offset : offset + 2] = np.full((32, 1), 0.01, np.float16).view(np.uint8)
    write_gguf(tmp_path / "m.gguf", config, raw={"blk.1.ffn_down.weight": (blocks, kind)})
    found = flat_params(open_checkpoint(tmp_path / "m.gguf").load_params("float32"))
    expected = gguf.quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], expected)
    assert np.ptp(expected) > 0


def test_q6_k_against_its_definition(tmp_path):
    """256 values a block: 4 low and 2 high bits each, 16 signed scales, one factor: d * scale * (q - 32)."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (32, 210), dtype=np.uint8)
    blocks[:, 208:210] = np.full((32, 1), 0.02, np.float16).view(np.uint8)
    config = tiny_config(intermediate_size=256)
    write_gguf(tmp_path / "m.gguf", config, raw={"blk.0.ffn_down.weight": (blocks, Q.Q6_K)})
    found = flat_params(open_checkpoint(tmp_path / "m.gguf").load_params("float32"))
    scale = np.float32(np.float16(0.02))
    for row in (0, 17):
        low, high = blocks[row, :128].astype(int), blocks[row, 128:192].astype(int)
        scales = blocks[row, 192:208].view(np.int8)
        for index in (0, 31, 32, 64, 100, 128, 191, 255):
            half, rest = divmod(index, 128)
            quarter, lane = divmod(rest, 32)
            nibble = low[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
            bits = high[32 * half + lane] >> (2 * quarter) & 3
            expected = scale * np.float32(scales[index // 16]) * np.float32((nibble | bits << 4) - 32)
            got = found["model.layers.0.mlp.down_proj.weight"][row, index]
            assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
    ],
)
def test_a_gguf_and_the_directory_that_it_was_made_from_are_the_same_model(tmp_path, changes):
    config = tiny_config(**changes)
    tensors = write_huggingface(tmp_path / "hf", config)
    write_gguf(tmp_path / "m.gguf", config, tensors=tensors)
    ours, theirs = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path / "hf")
    assert ours.config == theirs.config
    assert ours.generation.eos_token_ids == (258,)
    assert ours.generation.bos_token_id == theirs.generation.bos_token_id == 257
    assert_same(ours.load_params("float32"), tensors)
    text = "hello <s>wörld 42"
    assert ours.load_tokenizer().encode(text) == theirs.load_tokenizer().encode(text)


def test_a_directory_with_one_gguf_is_that_file(tmp_path):
    held = write_gguf(tmp_path / "m.gguf")
    assert_same(open_checkpoint(tmp_path).load_params("float32"), held)
    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files .*m\.gguf, n\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "expected", "context"),
    [
        ({}, RopeConfig(), 128),
        ({"llama.rope.freq_base": 5e5}, RopeConfig(theta=5e5), 128),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            RopeConfig(rope_type="linear", factor=2.0),
            256,
        ),
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(rope_type="linear", factor=4.0), 512),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
            128,
        ),
    ],
)
def test_rope_metadata(tmp_path, metadata, expected, context):
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config.rope == expected
    assert config.max_position_embeddings == context


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (1.0, 8.0), (2.0, 6.5)])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_settings_are_recovered_from_their_result(tmp_path, low, high, factor):
    factors = llama3_rope_factors(5e5, 64, factor, low, high, 8192).astype(np.float32)
    config = tiny_config(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    write_gguf(
        tmp_path / "m.gguf",
        config,
        raw={"rope_freqs.weight": (factors, Q.F32)},
        metadata={"llama.rope.freq_base": 5e5},
    )
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert rope.rope_type == "llama3"
    again = llama3_rope_factors(
        rope.theta,
        64,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings or 0,
    )
    np.testing.assert_allclose(again, factors, rtol=1e-4)


def test_rope_factors_of_ones_are_no_scaling_and_unknown_ones_stop_the_load(tmp_path):
    ones = np.ones(4, np.float32)
    write_gguf(tmp_path / "m.gguf", raw={"rope_freqs.weight": (ones, Q.F32)})
    assert open_checkpoint(tmp_path / "m.gguf").config.rope == RopeConfig()
    odd = np.array([1, 9, 2, 7], np.float32)
    write_gguf(tmp_path / "m.gguf", raw={"rope_freqs.weight": (odd, Q.F32)})
    refuse(tmp_path / "m.gguf", "rope_freqs.weight")


@pytest.mark.parametrize(
    ("metadata", "mention"),
    [
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv"),
        ({"split.count": 2}, "split"),
        ({"llama.block_count": 1}, "blk.1"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id"),
        ({"tokenizer.ggml.pre": "invented"}, "invented"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.tokens"),
    ],
)
def test_metadata_that_we_cannot_honour_is_named(tmp_path, metadata, mention):
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    refuse(tmp_path / "m.gguf", mention)


def test_an_unknown_architecture_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    refuse(tmp_path / "m.gguf", "mamba", "llama")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, types={"model.embed_tokens.weight": Q.Q8_0})
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for part in np.linspace(0, len(content) - 1, 23).astype(int):
        cut.write_bytes(content[:part])
        refuse(cut)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    refuse(path, "not a GGUF")


def test_values_that_are_no_numbers_stop_the_load(tmp_path):
    tensors = tiny_tensors(TINY_CONFIG)
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = np.nan
    tensors["lm_head.weight"][5, 5] = np.inf
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    refuse(tmp_path / "m.gguf", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight")


def test_the_config_survives_32_bit_metadata(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_config(rms_norm_eps=1e-6))
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert dataclasses.replace(config, rms_norm_eps=1e-6) == config
