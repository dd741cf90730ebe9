"""Exits on disk: a store like a model's (`orbax_store`) whose configuration says which model it is an exit of."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.checkpoint.orbax_store import StoreWeights, is_store, read_manifest, write_store
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.checkpoint.weights import as_tree, check_finite
from jaxserve.config import EXIT_ARCHITECTURE, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.exit import TOKEN_IDS, ExitShape, exit_bytes, exit_specs

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class ExitCheckpoint:
    """An exit that has been looked at but not loaded.

    Attributes:
      num_layers: how many of the model's layers stand before it.
    """

    path: Path
    num_layers: int
    shape: ExitShape
    vocab_size: int
    _weights: StoreWeights

    def param_bytes(self, itemsize: int) -> int:
        """What `load_params` will put on the device; see `exit_bytes`."""
        return exit_bytes(self._weights.specs, itemsize)

    def load_params(self, dtype: Any) -> dict[Any, Any]:
        """Nested dict as `exit_specs` names its leaves, floats in `dtype`.

        Raises:
          CheckpointError: a damaged file.
        """
        arrays = dict(
            self._weights.load(lambda spec: "int32" if spec.path == TOKEN_IDS else dtype, None, None)
        )
        check_finite(arrays, self.path)
        params = as_tree(arrays)
        token_ids = np.asarray(params["token_ids"])
        if token_ids[0] < 0 or token_ids[-1] >= self.vocab_size or (np.diff(token_ids) <= 0).any():
            raise CheckpointError(f"{self.path}: token_ids are not ascending ids of the vocabulary")
        return params


def open_exit(path: Path, model: ModelConfig, tokenizer: TokenizerParts) -> ExitCheckpoint:
    """Open the exit in a folder, to draft for a model.

    Raises:
      CheckpointError: there is none, or it is damaged, or it belongs to a model of another shape or vocabulary.
        (Another model of the same shape and vocabulary is not noticed: drafts would be worse, and answers the same.)
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; scripts/train_draft makes exits")
    if not is_store(path):
        raise CheckpointError(f"{path}: holds no exit; scripts/train_draft makes exits")
    manifest = read_manifest(path)
    config = manifest.config
    if config.get("architectures") != [EXIT_ARCHITECTURE]:
        raise CheckpointError(f"{path}: is the model {manifest.name}, and no exit of one")
    try:
        shape, num_layers, target = ExitShape(**config["shape"]), int(config["num_layers"]), config["target"]
        differing = [
            f"{name} {target['model'].get(name)} (here {value})"
            for name, value in _as_json(model).items()
            if target["model"].get(name) != value
        ]
        if not differing and target["vocabulary"] != _digest_of_vocabulary(tokenizer):
            differing = ["other words in its vocabulary"]
        name = str(target["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged manifest ({error!r})") from error
    if differing:
        raise CheckpointError(
            f"{path}: is an exit of another model, {name}, which has {', '.join(differing[:3])}"
        )
    if not 1 <= num_layers <= model.num_layers or shape.hidden_size != model.hidden_size:
        raise CheckpointError(f"{path}: damaged manifest (its own shape does not fit its model's)")
    weights = StoreWeights(path, manifest, exit_specs(shape))
    return ExitCheckpoint(path, num_layers, shape, model.vocab_size, weights)


def write_exit(
    path: Path,
    *,
    name: str,
    model: ModelConfig,
    tokenizer: TokenizerParts,
    num_layers: int,
    shape: ExitShape,
    params: Mapping[Any, Any],
    source: Mapping[str, Any],
) -> None:
    """Keep an exit in a folder, in the place of one that is there; as safe as `write_store`.

    Args:
      name, model, tokenizer: of the model that it belongs to.
      params: nested dict as `exit_specs` names its leaves.
      source: how it was made, for people.

    Raises:
      CheckpointError: the place can't be written, or holds something else.
    """
    if is_store(path) and read_manifest(path).config.get("architectures") != [EXIT_ARCHITECTURE]:
        raise CheckpointError(f"{path}: holds a model; choose another destination")
    arrays: dict[Any, jax.Array] = {}
    for spec in exit_specs(shape):
        leaf: Any = params
        for key in spec.path:
            leaf = leaf[key]
        arrays[spec] = leaf
    target = {"name": name, "model": _as_json(model), "vocabulary": _digest_of_vocabulary(tokenizer)}
    write_store(
        path,
        name=f"exit of {name}",
        arrays=arrays,
        tokenizer=None,
        config={
            "architectures": [EXIT_ARCHITECTURE],
            "num_layers": num_layers,
            "shape": asdict(shape),
            "target": target,
        },
        generation={},
        stored_dtype="float32",
        source=source,
    )


def _as_json(model: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(model)))
    return values


def _digest_of_vocabulary(tokenizer: TokenizerParts) -> str:
    words = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()
