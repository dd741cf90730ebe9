"""A Llama of two layers with random weights and the demo model's vocabulary, as a Hugging Face directory.

`python -m tests.tiny_model DIR` writes one, for long runs that ask nothing of a model but speed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.hf_config import parse_model_config
from jaxserve.checkpoint.orbax_store import read_manifest
from jaxserve.models.random_weights import init_random
from jaxserve.models.registry import get_family

TINY_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_model(directory: Path, demo_checkpoint: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write it into a new `directory`, with tokenizer and generation defaults of `demo_checkpoint` (a store).

    Args:
      changes: of TINY_CONFIG.
    """
    shutil.copytree(demo_checkpoint / read_manifest(demo_checkpoint).data / "tokenizer", directory)
    raw = {**TINY_CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(raw, indent=2))
    config = parse_model_config(raw, where="TINY_CONFIG")
    params = init_random(config, np.float32, seed)
    tensors = {
        spec.hf_name: np.asarray(reduce(lambda node, key: node[key], spec.path, params))
        for spec in get_family(config.architecture).weight_specs(config)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


if __name__ == "__main__":
    import sys

    from jaxserve.checkpoint import resolve_model
    from jaxserve.model_store import default_store

    print(write_tiny_model(Path(sys.argv[1]), resolve_model("smollm2", store=default_store())))
