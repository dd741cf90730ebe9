"""The Llama module's tree, names and contract with `attend`; its numbers are in test_llama_parity.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.llama import LlamaForCausalLM, weight_specs
from jaxserve.models.random_weights import init_random
from jaxserve.models.registry import get_family
from scripts.reference import tiny_models
from tests.models.model_harness import abstract_model, sequence_logits, tiny_config, tiny_params

LLAMA3_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)


def _leaves(tree: dict[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", sorted(tiny_models.CASES))
def test_specs_describe_the_module_exactly(case: str, dtype: jnp.dtype) -> None:
    config = tiny_config(case)
    tree = nnx.to_pure_dict(nnx.state(abstract_model(config, dtype)))
    module = {path: (leaf.shape, leaf.dtype) for path, leaf in _leaves(tree)}
    assert module == {spec.path: (spec.shape, jnp.dtype(dtype)) for spec in weight_specs(config)}


def test_tied_models_have_no_head_of_their_own() -> None:
    untied = dataclasses.replace(LLAMA3_70B, num_layers=1)
    tied = dataclasses.replace(untied, tie_word_embeddings=True)
    assert {s.hf_name for s in weight_specs(untied)} - {s.hf_name for s in weight_specs(tied)} == {
        "lm_head.weight"
    }


@pytest.mark.parametrize("case", sorted(tiny_models.CASES))
def test_gguf_names_are_those_of_the_gguf_package(case: str) -> None:
    config = tiny_config(case)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    specs = weight_specs(config)
    assert {s.hf_name: names.get_name(s.hf_name, (".weight", ".bias")) for s in specs} == {
        s.hf_name: s.gguf_name for s in specs
    }


def test_only_query_and_key_rows_are_interleaved_in_gguf() -> None:
    config = tiny_config("group4_llama3_tied_biased")
    heads = {spec.gguf_name: spec.gguf_rope_heads for spec in weight_specs(config)}
    assert {n.split(".", 2)[2]: h for n, h in heads.items() if h is not None and n.startswith("blk.0.")} == {
        "attn_q.weight": config.num_heads,
        "attn_q.bias": config.num_heads,
        "attn_k.weight": config.num_kv_heads,
        "attn_k.bias": config.num_kv_heads,
    }


def test_building_abstractly_allocates_nothing() -> None:
    """70 billion parameters wouldn't fit, so this can't pass by luck; and what little is made must not stay."""
    before = {id(a) for a in jax.live_arrays()}
    model = abstract_model(LLAMA3_70B, jnp.bfloat16)
    leaves = jax.tree.leaves(nnx.state(model))
    assert sum(leaf.size for leaf in leaves) > 70e9
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(a.nbytes for a in jax.live_arrays() if id(a) not in before) < 1024


@pytest.mark.parametrize("case", ["group3_tied", "group4_llama3", "group4_llama3_tied_biased"])
def test_every_float32_product_is_full_precision(case: str) -> None:
    """A product left at the default would run in TF32 on a GPU, which no CPU run could show."""
    graph, state = nnx.split(abstract_model(tiny_config(case), jnp.float32))

    def forward(state: nnx.State, token_ids_T: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        hidden_TD, _ = model(token_ids_T, token_ids_T, None, lambda layer, q, k, v, cache: (q, cache))
        return model.compute_logits(hidden_TD)

    jaxpr = jax.make_jaxpr(forward)(state, jnp.zeros(4, jnp.int32))
    products = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 7 * tiny_config(case).num_layers + 1
    assert all(set(e.params["precision"]) == {jax.lax.Precision.HIGHEST} for e in products)


def test_attend_is_called_layer_by_layer_and_owns_the_cache() -> None:
    config = tiny_config("group4_llama3")
    graph, state = nnx.split(abstract_model(config, jnp.float32))
    nnx.replace_by_pure_dict(state, tiny_params("group4_llama3"))
    calls = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: tuple) -> tuple[jax.Array, tuple]:
        calls.append((layer, q.shape, k.shape, v.shape))
        return q, (*cache, layer)

    hidden_TD, cache = nnx.merge(graph, state)(jnp.arange(5), jnp.arange(5), (), attend)
    shapes = ((5, config.num_heads, config.head_dim), *[(5, config.num_kv_heads, config.head_dim)] * 2)
    assert calls == [(layer, *shapes) for layer in range(config.num_layers)]
    assert cache == tuple(range(config.num_layers))
    assert hidden_TD.shape == (5, config.hidden_size)


def test_positions_and_not_places_in_the_batch_turn_queries() -> None:
    """Packed tokens arrive in any order: permuting them with their positions permutes what attend sees."""
    config = tiny_config("group8_yarn")
    graph, state = nnx.split(abstract_model(config, jnp.float32))
    nnx.replace_by_pure_dict(state, tiny_params("group8_yarn"))
    model = nnx.merge(graph, state)
    token_ids_T, positions_T = np.array([5, 9, 40, 2]), np.array([0, 31, 200, 7])
    order = np.array([2, 0, 3, 1])

    def seen(token_ids_T: np.ndarray, positions_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept: dict[int, tuple[jax.Array, jax.Array]] = {}

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: None
        ) -> tuple[jax.Array, None]:
            kept[layer] = (q, k)
            return q, cache

        model(jnp.asarray(token_ids_T), jnp.asarray(positions_T), None, attend)
        return np.asarray(kept[0][0]), np.asarray(kept[0][1])

    for plain, permuted in zip(
        seen(token_ids_T, positions_T), seen(token_ids_T[order], positions_T[order]), strict=True
    ):
        np.testing.assert_allclose(plain[order], permuted, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "relu6"}, {"rope": RopeConfig(rope_type="longrope")}],
    ids=["activation", "rope"],
)
def test_settings_nobody_implements_stop_the_build(change: dict[str, Any]) -> None:
    config = dataclasses.replace(tiny_config("group1_untied"), **change)
    with pytest.raises(CheckpointError, match="unsupported"):
        nnx.eval_shape(lambda: LlamaForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM"):
        get_family("GPT2LMHeadModel")


@pytest.mark.parametrize("case", ["group3_tied", "group4_attention_bias", "group4_llama3"])
def test_random_weights_make_a_lively_model(case: str) -> None:
    config = tiny_config(case)
    logits_TV = sequence_logits(config, init_random(config, jnp.float32, seed=3))(tiny_models.prompt(case))
    assert np.isfinite(logits_TV).all()
    assert 1 < logits_TV.std() < 20
    assert len(set(logits_TV.argmax(-1).tolist())) > 5


def test_random_weights_follow_the_seed() -> None:
    config = tiny_config("group2_mlp_bias_gelu")
    first, again, other = (dict(_leaves(init_random(config, jnp.bfloat16, seed=s))) for s in (1, 1, 2))
    assert {p: (a.shape, a.dtype) for p, a in first.items()} == {
        s.path: (s.shape, jnp.bfloat16) for s in weight_specs(config)
    }
    assert all((first[p] == again[p]).all() for p in first)
    assert all((first[p] != other[p]).any() for p in first)
