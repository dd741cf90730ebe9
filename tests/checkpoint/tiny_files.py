"""Tiny random models on disk, in every format, written by code that shares nothing with the readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]  # ids 256, 257, 258


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The base configuration with changes; None removes a key."""
    return {key: value for key, value in {**TINY_CONFIG, **changes}.items() if value is not None}


def tiny_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    query = head_dim * config["num_attention_heads"]
    kv = head_dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        shapes[f"{root}.input_layernorm.weight"] = (width,)
        shapes[f"{root}.post_attention_layernorm.weight"] = (width,)
        for name, shape, biased in (
            ("self_attn.q_proj", (query, width), "attention_bias"),
            ("self_attn.k_proj", (kv, width), "attention_bias"),
            ("self_attn.v_proj", (kv, width), "attention_bias"),
            ("self_attn.o_proj", (width, query), "attention_bias"),
            ("mlp.gate_proj", (inner, width), "mlp_bias"),
            ("mlp.up_proj", (inner, width), "mlp_bias"),
            ("mlp.down_proj", (width, inner), "mlp_bias"),
        ):
            shapes[f"{root}.{name}.weight"] = shape
            if config.get(biased):
                shapes[f"{root}.{name}.bias"] = shape[:1]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def byte_vocab() -> list[str]:
    """Byte-level characters first, special tokens after them, then a few merged tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, "he", "ll", "hell"]


MERGES = [("h", "e"), ("l", "l"), ("he", "ll")]


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(byte_vocab())}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_huggingface(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A complete model directory; returns its tensors."""
    config = TINY_CONFIG if config is None else config
    arrays = dict(tensors) if tensors is not None else tiny_tensors(config, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json", {"eos_token_id": [258, 2], "temperature": 0.6, "top_k": 40}
    )
    write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT_TEMPLATE},
    )
    write_json(directory / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    if shards == 1:
        save_file(arrays, directory / "model.safetensors")
        return arrays
    weight_map = {}
    names = list(arrays)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: arrays[name] for name in names[shard::shards]}
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return arrays


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(hf_name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if hf_name in fixed:
        return fixed[hf_name]
    _, _, layer, *middle, kind = hf_name.split(".")
    return f"blk.{layer}.{_GGUF_NAMES['.'.join(middle)]}.{kind}"


def interleave_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q/k rows, row by row: i of a head's first half goes to 2i, of its second half to 2i+1."""
    out = np.empty_like(array)
    head_dim = array.shape[0] // num_heads
    for head in range(num_heads):
        for row in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * row] = array[start + row]
            out[start + 2 * row + 1] = array[start + head_dim // 2 + row]
    return out


def write_gguf(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    tokens: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A GGUF of the same model; returns the tensors as the file holds them, dequantised, in Hugging Face order.

    Args:
      types: how to store a tensor, by Hugging Face name; F32 otherwise.
      raw: blocks to store as they are, by GGUF name; these tensors are not returned.
      metadata: further keys (bool, int, float, str), or None to leave one out.
    """
    config = TINY_CONFIG if config is None else config
    arrays = dict(tensors) if tensors is not None else tiny_tensors(config, seed=seed)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    if fields["tokenizer.ggml.model"] == "gpt2":
        vocab = list(tokens) if tokens is not None else byte_vocab()
        writer.add_token_list(vocab)
        writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in vocab])
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
    held: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if gguf_name(name) in (raw or {}):
            continue
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        swapped = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        stored = interleave_rows(array, swapped) if swapped else array
        blocks = gguf.quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
        # Quantisation works along a row, so moving rows before or after it gives the same values.
        held[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).reshape(array.shape)
    for name, (blocks, kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def flat_params(params: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """A parameter tree as Hugging Face name -> float32 array."""
    out: dict[str, np.ndarray] = {}

    def walk(tree: Any, path: tuple[str, ...]) -> None:
        if isinstance(tree, Mapping):
            for key, value in tree.items():
                walk(value, (*path, str(key)))
            return
        *root, leaf = path
        kind = "bias" if leaf == "bias" else "weight"
        name = ".".join([*root, kind])
        out[name if root[0] == "lm_head" else f"model.{name}"] = np.asarray(tree, dtype=np.float32)

    walk(params, ())
    return out


def assert_same(params: Mapping[Any, Any], expected: Mapping[str, np.ndarray]) -> None:
    """The tree holds exactly the expected tensors, value for value."""
    found = flat_params(params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(array, np.float32), err_msg=name)
