"""Small random models that the recorder and the parity tests build alike, without committing their weights.

Needs numpy only and runs on Python 3.11, because the recorder's environment holds PyTorch and not jaxserve.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 97
PROMPT_TOKENS = 72

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _heads(query: int, kv: int, head_dim: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": head_dim}


# The contexts of before scaling are shorter than the prompt, so that every branch of a scaling rule has work.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Keyword arguments of transformers' LlamaConfig, by the case's name.
CASES: dict[str, dict[str, Any]] = {
    "group1_untied": {**_BASE},
    "group3_tied": {**_BASE, **_heads(9, 3, 16), "hidden_size": 72, "tie_word_embeddings": True},
    "group3_theta_1e5": {
        **_BASE,
        **_heads(6, 2, 8),
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "group4_llama3": {**_BASE, **_heads(8, 2, 16), "rope_parameters": _LLAMA3},
    "group4_llama3_tied_biased": {
        **_BASE,
        **_heads(4, 1, 32),
        "rope_parameters": {**_LLAMA3, "factor": 32.0},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "group7_linear": {
        **_BASE,
        **_heads(7, 1, 10),
        "hidden_size": 56,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "group8_yarn": {**_BASE, **_heads(16, 2, 16), "rope_parameters": _YARN},
    "group2_yarn_mscale_untruncated": {
        **_BASE,
        **_heads(4, 2, 32),
        "rope_parameters": {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.1, "truncate": False},
    },
    "group2_yarn_attention_factor": {
        **_BASE,
        **_heads(4, 2, 24),
        "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.25},
    },
    "group4_attention_bias": {**_BASE, **_heads(8, 2, 6), "attention_bias": True},
    "group2_mlp_bias_gelu": {
        **_BASE,
        **_heads(4, 2, 12),
        "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def weight(case: str, hf_name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The weight that Hugging Face calls `hf_name`, the same on every machine.

    Uniform draws take their bits straight from the generator, so no math library has a say in them.
    """
    rng = np.random.default_rng(zlib.crc32(f"{case}/{hf_name}".encode()))
    centred = rng.random(shape, dtype=np.float32) - np.float32(0.5)
    if hf_name.endswith("norm.weight"):
        return np.float32(1.0) + centred
    if hf_name.endswith(".bias"):
        return centred
    gain = 4.0 if shape[0] == VOCAB_SIZE else 1.5
    return centred * np.float32(gain * (12 / shape[-1]) ** 0.5)


def prompt(case: str) -> list[int]:
    """Token ids the case is judged on."""
    rng = np.random.default_rng(zlib.crc32(f"{case}/prompt".encode()))
    return [int(i) for i in rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS)]
