"""What a config.json says must arrive whole, or stop the load: nothing is silently ignored."""

from __future__ import annotations

import math

import pytest
from transformers import LlamaConfig

from jaxserve.checkpoint.hf_config import parse_generation_defaults, parse_model_config
from jaxserve.config import GenerationDefaults, RopeConfig
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import tiny_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def parse(**changes):
    return parse_model_config(tiny_config(**changes), where="config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": None},
        {"rms_norm_eps": None},
        {"rope_theta": None},
        {"rope_theta": 500000},
        {"max_position_embeddings": None},
        {"head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 2e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_agrees_with_transformers(changes):
    config = parse(**changes)
    theirs = LlamaConfig(**tiny_config(**changes))
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.attention_bias == theirs.attention_bias
    assert config.mlp_bias == theirs.mlp_bias
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert config.rope.rope_type == rope["rope_type"]
    assert config.rope.theta == rope["rope_theta"]
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if rope["rope_type"] != "default" and key in rope:
            assert getattr(config.rope, key) == rope[key], key
    assert config.max_position_embeddings >= theirs.max_position_embeddings


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("default", {}),
        ("linear", {"factor": 2}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "mscale": 0.7}),
    ],
)
def test_every_spelling_of_a_rope_type_means_the_same(key, kind, settings):
    old = parse(rope_scaling={key: kind, **settings}, rope_theta=5000)
    new = parse(rope_parameters={key: kind, "rope_theta": 5000.0, **settings}, rope_theta=None)
    assert old == new
    assert old.rope.rope_type == kind
    assert old.rope.theta == 5000.0
    for name, value in settings.items():
        assert kind == "linear" or getattr(old.rope, name) == value
    if kind in ("linear", "yarn"):
        assert old.max_position_embeddings == 256  # 128 doubled; 64 times 4


def test_both_spellings_at_once_may_agree_but_not_differ():
    agreeing = parse(rope_scaling={"type": "yarn", "rope_type": "yarn", "factor": 2.0})
    assert agreeing.rope.rope_type == "yarn"
    with pytest.raises(CheckpointError, match=r"'linear'.*'yarn'"):
        parse(rope_scaling={"type": "yarn", "rope_type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match="disagree about factor"):
        parse(
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        )


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "invented", 3])
def test_an_unsupported_rope_type_stops_the_load_by_name(key, kind):
    with pytest.raises(CheckpointError) as caught:
        parse(rope_scaling={key: kind, "factor": 2.0})
    assert repr(kind) in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": None},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "linear", "factor": math.nan},
        {"rope_type": "yarn", "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
        {"factor": 2.0},
        {"full_attention": {"rope_type": "default"}},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        "linear",
    ],
)
def test_incomplete_rope_settings_stop_the_load(scaling):
    with pytest.raises(CheckpointError, match="rope_scaling"):
        parse(rope_scaling=scaling)


def test_absent_rope_settings_are_the_plain_rotary():
    assert parse(rope_scaling=None).rope == RopeConfig(theta=10000.0)
    config = {**tiny_config(), "rope_scaling": None, "rope_parameters": None, "rope_theta": None}
    assert parse_model_config(config, where="x").rope == RopeConfig(theta=10000.0)


def test_yarn_without_a_factor_takes_the_ratio_of_the_two_lengths():
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert parse(rope_scaling=scaling).rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"architectures": None, "model_type": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_we_cannot_honour_stops_the_load_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named) as caught:
        parse(**changes)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_every_accepted_activation_is_one_that_the_model_has():
    from jaxserve.checkpoint.hf_config import _ACTIVATIONS
    from jaxserve.models import layers

    names = next(v for v in vars(layers).values() if isinstance(v, dict) and "silu" in v)
    assert set(_ACTIVATIONS.values()) <= set(names)


def test_model_type_stands_in_for_a_missing_architecture():
    assert parse(architectures=None).architecture == "LlamaForCausalLM"


def defaults(generation, config, **rest):
    return parse_generation_defaults(
        generation, config, where="generation_config.json", vocab_size=100, **rest
    )


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": 5}, {}, None, (5,)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, 8, (5, 6, 7, 8)),
        ({}, {"eos_token_id": [7, 7]}, 7, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, 3, (3,)),
        ({"eos_token_id": -1}, {"eos_token_id": 100}, 99, (99,)),
        ({}, {}, None, ()),
    ],
)
def test_every_known_end_ends_a_reply(generation, config, tokenizer_eos, expected):
    assert defaults(generation, config, tokenizer_eos=tokenizer_eos).eos_token_ids == expected


def test_sampling_values_arrive_unless_the_model_is_said_not_to_sample():
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1}
    assert defaults(values, {}) == GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=0, repetition_penalty=1.1
    )
    greedy = defaults({**values, "do_sample": False}, {})
    assert greedy == GenerationDefaults(repetition_penalty=1.1)


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": "5"},
        {"eos_token_id": [5, None]},
        {"temperature": "hot"},
        {"temperature": -1.0},
        {"temperature": 101.0},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-9},
    ],
)
def test_generation_values_that_no_request_may_have_are_named(values):
    """Every request that names none of its own would be refused for them, as if it were the client's fault."""
    with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(values))}"):
        defaults(values, {})
