"""Which architectures exist, and how each one's weights are named. A new family is one file and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter: where it lives in the module tree, what files call it, and its shape.

    Attributes:
      path: keys from the root of the module's pure parameter dict, e.g.
        ``("layers", 0, "self_attn", "q_proj", "kernel")``.
      hf_name: tensor name in Hugging Face safetensors.
      gguf_name: tensor name in GGUF.
      shape: as stored by Hugging Face and by us: matrices are [out, in].
      gguf_rope_heads: heads of a q/k projection whose rows GGUF stores interleaved (llama.cpp permutes
        them for its rotary layout); None where GGUF keeps the Hugging Face order.
      optional: absent from the file is fine (a tied lm_head).
    """

    path: tuple[str | int, ...]
    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    gguf_rope_heads: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Attributes:
    build: makes the module: ``build(config, dtype=..., rngs=..., deterministic=False)``; under `nnx.eval_shape` it
      allocates nothing. A module has ``embed(token_ids_T, positions_T) -> (x_TD, shared)``, `layers` with
      ``layer(x_TD, shared, index, kv_cache, attend) -> (x_TD, kv_cache)`` each, ``norm(x_TD)``,
      ``compute_logits(hidden_SD)``, and `num_shared_arrays`: how many arrays the tuple `shared` has. What it is
      apart from its layers must not depend on `config.num_layers`.
    weight_specs: every parameter of a configuration.
    """

    build: Callable[..., nnx.Module]
    weight_specs: Callable[[ModelConfig], list[WeightSpec]]


def _llama() -> ModelFamily:
    from jaxserve.models import llama

    return ModelFamily(build=llama.LlamaForCausalLM, weight_specs=llama.weight_specs)


_FAMILIES: dict[str, Callable[[], ModelFamily]] = {"LlamaForCausalLM": _llama}


def get_family(architecture: str) -> ModelFamily:
    """The family of a Hugging Face architecture name.

    Raises:
      CheckpointError: nobody has registered it; the text lists what is supported.
    """
    if architecture not in _FAMILIES:
        raise CheckpointError(
            f"unknown architecture {architecture!r}; supported: {', '.join(supported_architectures())}"
        )
    return _FAMILIES[architecture]()


def supported_architectures() -> list[str]:
    return sorted(_FAMILIES)


def set_by_path(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put `value` at `path`, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
