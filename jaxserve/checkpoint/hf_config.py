"""A Hugging Face `config.json` or `generation_config.json` (as dicts) -> our frozen configurations.

GGUF metadata is first rewritten into the same spelling (see `gguf_reader`), so this is the only parser.
Where a key is absent, the default is that of transformers' `LlamaConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.config import GenerationDefaults, ModelConfig, RopeConfig, RopeType
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxserve.models.registry import supported_architectures
from jaxserve.request import SamplingParams

_ARCHITECTURE_OF_MODEL_TYPE = {"llama": "LlamaForCausalLM"}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",  # the same approximation under its older name
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
_ROPE_TYPES: dict[str, RopeType] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}


class _Reader:
    """Typed access to a config dict; every complaint starts with where the dict came from."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"{key} must be an integer of at least {minimum}, got {value!r}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"{key} must be a finite number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(f"{key} must be greater than 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, got {value!r}")
        return value


def parse_model_config(config: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Parse the content of a `config.json`.

    Args:
      where: what to call the dict in errors, usually the file's path.

    Raises:
      CheckpointError: unknown architecture, rope type or activation; a missing, ill-typed or contradictory value;
        a feature that would change the output and that we don't have (quantised weights, partial rotary, a sliding
        window).
    """
    read = _Reader(config, where)
    architecture = _architecture(read)
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        name = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
        raise read.fail(f"quantization_config: weights quantised with {name!r} are not supported")
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    head_dim = read.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise read.fail(
                f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}) "
                "and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise read.fail(f"head_dim must be even for rotary embeddings, got {head_dim}")
    rope, max_positions = _rope(read, read.integer("max_position_embeddings", 2048))
    _refuse_sliding_window(read, max_positions)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            hidden_act=_activation(read),
            rope=rope,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
        )
    except ConfigError as error:
        raise read.fail(str(error)) from error


def _architecture(read: _Reader) -> str:
    names = read.values.get("architectures")
    if names is None:
        model_type = read.values.get("model_type")
        if model_type is None:
            raise read.fail("neither architectures nor model_type is given")
        names = [_ARCHITECTURE_OF_MODEL_TYPE.get(str(model_type), str(model_type))]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise read.fail(f"architectures must be a list of names, got {names!r}")
    known = supported_architectures()
    if names[0] not in known:
        raise read.fail(f"unknown architecture {names[0]!r}; supported: {', '.join(known)}")
    return names[0]


def _refuse_sliding_window(read: _Reader, max_positions: int) -> None:
    """A window that covers the whole context, or that the config itself switches off, changes nothing."""
    window = read.optional_integer("sliding_window", minimum=0)
    layer_types = read.values.get("layer_types") or []
    by_layer = isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types)
    if by_layer or (window and window < max_positions and read.flag("use_sliding_window", True)):
        what = "layer_types other than full_attention are" if by_layer else f"sliding_window {window} is"
        raise read.fail(f"{what} not supported: every layer attends to the whole context")


def _activation(read: _Reader) -> str:
    name = read.values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise read.fail(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope(read: _Reader, max_positions: int) -> tuple[RopeConfig, int]:
    """The rotary settings, and the context length they give.

    Spellings understood: a top-level `rope_theta` with `rope_scaling` (`type` or `rope_type`), and the
    `rope_parameters` of transformers 5, which holds theta as well.

    Context: `linear` stretches `max_position_embeddings` by its factor (as vLLM reads it); `yarn` stretches
    `original_max_position_embeddings`, unless the config's own number is larger already; `llama3` states the
    stretched length itself.
    """
    scaling: dict[str, Any] = {}
    source = "rope_parameters"
    for key in ("rope_scaling", "rope_parameters"):
        value = read.values.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise read.fail(f"{key} must be an object, got {value!r}")
        if any(isinstance(entry, Mapping) for entry in value.values()):
            raise read.fail(f"{key}: settings that differ between layer types are not supported")
        conflicting = [k for k in value if k in scaling and scaling[k] != value[k]]
        if conflicting:
            raise read.fail(f"rope_scaling and rope_parameters disagree about {conflicting[0]}")
        scaling.update(value)
        source = key
    rope = _Reader(scaling, f"{read.where}: {source}")
    rope_type = _rope_type(rope)
    theta = rope.positive("rope_theta", read.positive("rope_theta", 10000.0))
    for holder in (read, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.fail("partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return RopeConfig(theta=theta), max_positions
    original = read.optional_integer("original_max_position_embeddings") or rope.integer(
        "original_max_position_embeddings", max_positions
    )
    implied = max_positions / original if rope_type == "yarn" and original < max_positions else None
    factor = rope.number("factor", implied)
    if factor < 1.0:
        raise rope.fail(f"factor must be at least 1, got {factor}")
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor), int(max_positions * factor)
    if rope_type == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.fail(f"high_freq_factor ({high}) must be greater than low_freq_factor ({low})")
        llama3 = RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return llama3, max_positions
    yarn = RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast") if scaling.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow") if scaling.get("beta_slow") else 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
    return yarn, max(max_positions, int(original * factor))


def _rope_type(rope: _Reader) -> RopeType:
    names = [rope.values[key] for key in ("rope_type", "type") if rope.values.get(key) is not None]
    if not names:
        if rope.values.get("factor") is not None:
            raise rope.fail("a factor is given but neither rope_type nor type")
        return "default"
    if any(name != names[0] for name in names):
        raise rope.fail(f"rope_type {names[0]!r} and type {names[1]!r} disagree")
    if not isinstance(names[0], str) or names[0] not in _ROPE_TYPES:
        raise rope.fail(f"rope_type {names[0]!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    return _ROPE_TYPES[names[0]]


def parse_generation_defaults(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    where: str,
    vocab_size: int,
    tokenizer_eos: int | None = None,
    tokenizer_bos: int | None = None,
) -> GenerationDefaults:
    """Merge what `generation_config.json`, `config.json` and the tokenizer say about ending and sampling.

    The ids that end a reply are the union of all three, in that order; ids outside the vocabulary can never be
    sampled and are dropped. Sampling values are ignored where the file says `do_sample: false`.

    Args:
      generation: content of `generation_config.json`; empty when there is none.
      config: content of `config.json`.

    Raises:
      CheckpointError: a value of the wrong type, or that no request may ask for.
    """
    read = _Reader(generation, where)
    ids = [*_token_ids(read, "eos_token_id"), *_token_ids(_Reader(config, where), "eos_token_id")]
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    bos = [*_token_ids(read, "bos_token_id"), *_token_ids(_Reader(config, where), "bos_token_id")]
    if tokenizer_bos is not None:
        bos.insert(0, tokenizer_bos)
    samples = read.flag("do_sample", True)
    temperature = read.optional_number("temperature")
    top_p = read.optional_number("top_p")
    top_k = read.optional_integer("top_k", minimum=-1)
    penalty = read.optional_number("repetition_penalty")
    values = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "repetition_penalty": penalty}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**given)  # else every request that leaves them to the model would be refused
    except InvalidRequestError as error:
        raise read.fail(str(error)) from error
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(i for i in ids if i < vocab_size)),
        bos_token_id=next((i for i in bos if i < vocab_size), None),
        temperature=temperature if samples else None,
        top_p=top_p if samples else None,
        top_k=max(top_k, 0) if samples and top_k is not None else None,
        repetition_penalty=penalty,
    )


def _token_ids(read: _Reader, key: str) -> Iterable[int]:
    value = read.values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise read.fail(f"{key} must be an id or a list of ids, got {value!r}")
    return tuple(token for token in ids if token >= 0)
