"""int8 matrices: how they are made, from every format, and what a product with them is."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint import convert, open_checkpoint, orbax_store
from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.device.memory_account import tree_bytes
from jaxserve.device.params import fill_params
from jaxserve.device.step_parts import split_model
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.quantization import Int8Linear, quantise_rows
from tests.checkpoint.tiny_files import tiny_config, tiny_tensors, write_gguf, write_huggingface

MODEL = ModelConfig("LlamaForCausalLM", 272, 32, 64, 2, 4, 2, 8, 128)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_no_value_is_off_by_more_than_half_a_step(seed: int, scale: float) -> None:
    x = np.random.default_rng(seed).standard_normal((5, 24)).astype(np.float32) * np.float32(scale)
    x[2] = 0
    rounded, scales = (np.asarray(part, np.float64) for part in quantise_rows(jnp.asarray(x)))
    assert np.abs(rounded).max() == 127
    assert (np.abs(rounded * scales - x) <= scales * 0.50001).all()
    assert not rounded[2].any()
    assert scales[2] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_the_scale(bad: float) -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 4] = bad
    assert np.isfinite(np.asarray(quantise_rows(jnp.asarray(x))[1])[:, 0]).tolist() == [True, False, True]


@pytest.mark.parametrize("use_bias", [False, True])
def test_the_product_is_that_of_the_rounded_numbers(use_bias: bool) -> None:
    rng = np.random.default_rng(0)
    bias = nnx.Param(jnp.arange(10.0)) if use_bias else None
    layer = Int8Linear(24, 10, bias=bias)
    kernel, kernel_scale = rng.integers(-127, 128, (10, 24)), rng.random(10, np.float32)
    layer.kernel[...], layer.kernel_scale[...] = jnp.asarray(kernel, jnp.int8), jnp.asarray(kernel_scale)
    x = jnp.asarray(rng.standard_normal((4, 24)), jnp.float32)
    rounded, scale = (np.asarray(part, np.float64) for part in quantise_rows(x))
    expected = (rounded @ kernel.T) * scale * kernel_scale + (np.arange(10.0) if use_bias else 0)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    assert layer(x.astype(jnp.bfloat16)).dtype == (jnp.float32 if use_bias else jnp.bfloat16)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_every_format_gives_what_the_module_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    monkeypatch.setattr(orbax_store, "_PART_BYTES", 5000)  # several parts
    tensors = write_huggingface(tmp_path / "hf", tiny_config(**changes))
    convert(tmp_path / "hf", tmp_path / "store")
    for directory in ("hf", "store"):
        checkpoint = open_checkpoint(tmp_path / directory)
        params = checkpoint.load_params("bfloat16", quantization="int8")
        assert checkpoint.param_bytes("bfloat16", quantization="int8") == tree_bytes(params)
        assert checkpoint.param_bytes("bfloat16") == tree_bytes(checkpoint.load_params("bfloat16"))
        layer = params["layers"][1]
        kernel = layer["mlp"]["down_proj"]["kernel"]
        scale = np.asarray(layer["mlp"]["down_proj"]["kernel_scale"])[:, None]
        assert kernel.dtype == jnp.int8
        wanted = tensors["model.layers.1.mlp.down_proj.weight"]  # not rounded to bfloat16 before
        assert (np.abs(np.asarray(kernel, np.float32) * scale - wanted) <= scale * 0.50001).all()
        assert params["embed_tokens"]["embedding"].dtype == params["norm"]["scale"].dtype == jnp.bfloat16
        _, abstract = split_model(checkpoint.config, dtype=jnp.dtype("bfloat16"), quantization="int8")
        filled = fill_params(abstract, params)
        shapes = lambda tree: [(x.shape, x.dtype) for x in nnx.to_flat_state(tree).leaves]  # noqa: E731
        assert all(shapes(a) == shapes(b) for a, b in zip(filled.layers, abstract.layers, strict=True))


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0]
)
def test_a_gguf_file_becomes_int8_from_its_dequantised_values(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    """q and k lie in another order in the file: a scale must stay with its row."""
    types = {name: kind for name, array in tiny_tensors(tiny_config()).items() if array.ndim == 2}
    held = write_gguf(tmp_path / "m.gguf", types=types)
    params = open_checkpoint(tmp_path / "m.gguf").load_params("bfloat16", quantization="int8")
    for layer, module, name in (
        (0, "self_attn", "q_proj"),
        (1, "self_attn", "k_proj"),
        (1, "mlp", "down_proj"),
    ):
        leaves = params["layers"][layer][module][name]
        assert leaves["kernel"].dtype == jnp.int8
        scale = np.asarray(leaves["kernel_scale"])[:, None]
        wanted = held[f"model.layers.{layer}.{module}.{name}.weight"]
        assert (np.abs(np.asarray(leaves["kernel"], np.float32) * scale - wanted) <= scale * 0.50001).all()


def test_damage_is_found_in_a_matrix_that_became_integers(tmp_path: Path) -> None:
    def spoil(name: str, array: np.ndarray) -> np.ndarray:
        return np.where(np.arange(array.size).reshape(array.shape) == 7, np.nan, array)

    from safetensors.numpy import load_file, save_file

    write_huggingface(tmp_path / "hf")
    [file] = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = spoil(name, tensors[name]).astype(np.float32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="q_proj"):
        open_checkpoint(tmp_path / "hf").load_params("float32", quantization="int8")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"one of int8.*'int4'"):
        resolve(EngineConfig(quantization="int4"), MODEL, platform="cpu")  # type: ignore[arg-type]


def test_on_a_cpu_it_is_deterministic() -> None:
    for platform, expected in (("cpu", True), ("cuda", False)):
        assert resolve(EngineConfig(quantization="int8"), MODEL, platform=platform).deterministic is expected
