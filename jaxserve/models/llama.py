"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama, ...) as Flax NNX modules over flat packed tokens.

The model knows nothing of batches or caches: tokens of all sequences lie in one axis T, and `attend` (given by
the compiled step) decides who sees whom and where keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.models.layers import Embedding, GatedMLP, Linear, Product, RMSNorm, apply_each, project
from jaxserve.models.registry import WeightSpec
from jaxserve.models.rope import apply_rope, rope_cos_sin, rope_frequencies

# (layer, q [T, H, d], k [T, K, d], v [T, K, d], kv_cache) -> (out [T, H, d], kv_cache); q and k are rotated,
# the softmax scale (head_dim ** -0.5) is attend's to apply.
AttendFn = Callable[[int, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class LlamaAttention(nnx.Module):
    """Projections and rotary embedding around `attend`. [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, head_dim = config.hidden_size, config.head_dim
        bias = config.attention_bias
        query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.q_proj = Linear(width, query_width, use_bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(width, kv_width, use_bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(width, kv_width, use_bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(query_width, width, use_bias=bias, dtype=dtype, rngs=rngs)
        self.num_heads = config.num_heads
        self.head_dim = head_dim

    def __call__(
        self,
        x_TD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        layer: int,
        kv_cache: Any,
        attend: AttendFn,
    ) -> tuple[jax.Array, Any]:
        tokens = x_TD.shape[0]
        projected = apply_each((self.q_proj, self.k_proj, self.v_proj), x_TD)
        q_THd, k_TKd, v_TKd = (each.reshape(tokens, -1, self.head_dim) for each in projected)
        q_THd, k_TKd = apply_rope(q_THd, *cos_sin), apply_rope(k_TKd, *cos_sin)
        out_THd, kv_cache = attend(layer, q_THd, k_TKd, v_TKd, kv_cache)
        return self.o_proj(out_THd.reshape(tokens, self.num_heads * self.head_dim)), kv_cache


class LlamaBlock(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, deterministic: bool):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps, dtype=dtype, deterministic=deterministic)
        self.self_attn = LlamaAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(width, eps=eps, dtype=dtype, deterministic=deterministic)
        self.mlp = GatedMLP(
            width,
            config.intermediate_size,
            hidden_act=config.hidden_act,
            use_bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x_TD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        layer: int,
        kv_cache: Any,
        attend: AttendFn,
    ) -> tuple[jax.Array, Any]:
        with jax.named_scope("self_attn"):
            attended_TD, kv_cache = self.self_attn(
                self.input_layernorm(x_TD), cos_sin, layer, kv_cache, attend
            )
            x_TD = x_TD + attended_TD
        with jax.named_scope("mlp"):
            return x_TD + self.mlp(self.post_attention_layernorm(x_TD)), kv_cache


class LlamaForCausalLM(nnx.Module):
    """Decoder with its output head. Under `nnx.eval_shape` building it allocates nothing.

    Args:
      config: the model's shape; its rotary settings are checked here.
      dtype: of weights and activations.
      deterministic: a token's hidden state has the same bits whatever T is (at least 2), where matrix products do.

    Raises:
      CheckpointError: an activation or rotary setting that this family does not have.
    """

    num_shared_arrays = 2

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs, deterministic: bool = False):
        dtype = jnp.dtype(dtype)
        rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        self.config = config
        self.project: Product = project
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                LlamaBlock(config, dtype=dtype, rngs=rngs, deterministic=deterministic)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, deterministic=deterministic
        )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, rngs=rngs
            )

    def embed(
        self, token_ids_T: jax.Array, positions_T: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """What comes before the blocks.

        Args:
          token_ids_T: int32 [T].
          positions_T: int32 [T], each token's position in its own sequence.

        Returns:
          (x_TD, (cos, sin) of the rotary embedding, which all blocks share)
        """
        config = self.config
        # A function of the config alone, so a constant of the compiled step rather than a weight.
        frequencies_d, factor = rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        with jax.named_scope("embed_tokens"):
            return self.embed_tokens(token_ids_T), rope_cos_sin(positions_T, frequencies_d, factor)

    def __call__(
        self, token_ids_T: jax.Array, positions_T: jax.Array, kv_cache: Any, attend: AttendFn
    ) -> tuple[jax.Array, Any]:
        """The whole model, as `device.step` runs it part by part.

        Args:
          kv_cache: whatever `attend` takes and gives back.

        Returns:
          (hidden states after the final norm [T, D] in the model's dtype, kv_cache)
        """
        x_TD, cos_sin = self.embed(token_ids_T, positions_T)
        for layer, block in enumerate(self.layers):
            x_TD, kv_cache = block(x_TD, cos_sin, layer, kv_cache, attend)
        return self.norm(x_TD), kv_cache

    def compute_logits(self, hidden_SD: jax.Array) -> jax.Array:
        """[S, D] (normed) -> float32 [S, V], whatever the model's dtype is."""
        head = self.embed_tokens.embedding if self.config.tie_word_embeddings else self.lm_head.kernel
        with jax.named_scope("lm_head"):
            return self.project(hidden_SD, head[...], out_dtype=jnp.dtype(jnp.float32))


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every parameter of `config`, outermost first; a tied model has no `lm_head` leaf."""
    width, inner = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    specs = [
        WeightSpec(
            ("embed_tokens", "embedding"),
            "model.embed_tokens.weight",
            "token_embd.weight",
            (config.vocab_size, width),
        ),
        WeightSpec(("norm", "scale"), "model.norm.weight", "output_norm.weight", (width,)),
    ]
    if not config.tie_word_embeddings:
        specs.append(
            WeightSpec(("lm_head", "kernel"), "lm_head.weight", "output.weight", (config.vocab_size, width))
        )
    # (block, projection, GGUF name, out, in, has bias, heads whose rows GGUF interleaves)
    projections = [
        ("self_attn", "q_proj", "attn_q", query_width, width, config.attention_bias, config.num_heads),
        ("self_attn", "k_proj", "attn_k", kv_width, width, config.attention_bias, config.num_kv_heads),
        ("self_attn", "v_proj", "attn_v", kv_width, width, config.attention_bias, None),
        ("self_attn", "o_proj", "attn_output", width, query_width, config.attention_bias, None),
        ("mlp", "gate_proj", "ffn_gate", inner, width, config.mlp_bias, None),
        ("mlp", "up_proj", "ffn_up", inner, width, config.mlp_bias, None),
        ("mlp", "down_proj", "ffn_down", width, inner, config.mlp_bias, None),
    ]
    for layer in range(config.num_layers):
        root: tuple[str | int, ...] = ("layers", layer)
        hf_root, gguf_root = f"model.layers.{layer}", f"blk.{layer}"
        for norm, gguf_norm in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
            specs.append(
                WeightSpec(
                    (*root, norm, "scale"),
                    f"{hf_root}.{norm}.weight",
                    f"{gguf_root}.{gguf_norm}.weight",
                    (width,),
                )
            )
        for part, name, gguf_name, out_width, in_width, has_bias, rope_heads in projections:
            hf_name, gguf_name = f"{hf_root}.{part}.{name}", f"{gguf_root}.{gguf_name}"
            specs.append(
                WeightSpec(
                    (*root, part, name, "kernel"),
                    f"{hf_name}.weight",
                    f"{gguf_name}.weight",
                    (out_width, in_width),
                    gguf_rope_heads=rope_heads,
                )
            )
            if has_bias:
                specs.append(
                    WeightSpec(
                        (*root, part, name, "bias"),
                        f"{hf_name}.bias",
                        f"{gguf_name}.bias",
                        (out_width,),
                        gguf_rope_heads=rope_heads,
                    )
                )
    return specs
