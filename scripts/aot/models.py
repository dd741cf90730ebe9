"""Configurations of the models whose whole step is compiled, as their files give them."""

from __future__ import annotations

from jaxserve.config import ModelConfig, RopeConfig

MODELS = {
    "llama3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope=RopeConfig(
            rope_type="llama3",
            theta=500_000.0,
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
    ),
}
