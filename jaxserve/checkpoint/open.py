"""Opening a model of any format, and converting it to our store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.checkpoint.gguf_reader import GgufFile, GgufWeights, gguf_extra_eos, gguf_to_hf_config
from jaxserve.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from jaxserve.checkpoint.hf_config import parse_generation_defaults, parse_model_config
from jaxserve.checkpoint.huggingface import HuggingFaceWeights
from jaxserve.checkpoint.json_file import read_json_object, read_optional_json_object
from jaxserve.checkpoint.known_models import KNOWN_MODELS
from jaxserve.checkpoint.orbax_store import (
    MANIFEST_NAME,
    StoreWeights,
    read_manifest,
    write_store,
)
from jaxserve.checkpoint.tokenizer_files import load_tokenizer_files
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts, check_ids_fit
from jaxserve.checkpoint.weights import WeightReader, as_tree, check_finite, main_dtype, quantise
from jaxserve.config import EXIT_ARCHITECTURE, GenerationDefaults, ModelConfig, Quantization
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec, get_family

if TYPE_CHECKING:
    import jax

    from jaxserve.checkpoint.weights import ShardingChoice
    from jaxserve.progress import Progress
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve.checkpoint")

Kind = Literal["huggingface", "gguf", "orbax"]
_STORED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk that has been looked at (configuration, tokenizer, names and shapes) but not loaded.

    Attributes:
      name: the file's or directory's name, or what the store's manifest calls it.
      stored_dtype: type that holds most of the weights ("float32" for quantised ones, which are dequantised).
      hf_config, hf_generation: what `config` and `generation` were parsed from.
    """

    name: str
    path: Path
    kind: Kind
    config: ModelConfig
    generation: GenerationDefaults
    stored_dtype: str
    hf_config: Mapping[str, Any] = field(repr=False)
    hf_generation: Mapping[str, Any] = field(repr=False)
    weights: WeightReader = field(repr=False)
    tokenizer_parts: TokenizerParts = field(repr=False)

    def load_params(
        self,
        dtype: Any,
        *,
        quantization: Quantization | None = None,
        sharding: ShardingChoice = None,
        progress: Progress | None = None,
    ) -> dict[Any, Any]:
        """The weights on the device, as a nested dict keyed like `WeightSpec.path`.

        Args:
          dtype: of every leaf, whatever the file's is (float16 is never computed in).
          quantization: matrices that it turns into integers are made from the file's own values, leaf by leaf.
          sharding: for all leaves, or a function that gives one for each; None is the default device.

        Raises:
          CheckpointError: a damaged file, or NaN or infinite values (a float32 value beyond bfloat16's range counts).
        """
        return as_tree(
            self.load_leaves(dtype, quantization=quantization, sharding=sharding, progress=progress)
        )

    def param_bytes(self, dtype: Any, *, quantization: Quantization | None = None) -> int:
        """What `load_params` will put on the device."""
        import jax.numpy as jnp

        from jaxserve.models.quantization import spec_bytes

        itemsize = jnp.dtype(dtype).itemsize
        return sum(spec_bytes(spec, itemsize, quantization) for spec in self.weights.specs)

    def load_leaves(
        self,
        dtype: Any,
        *,
        quantization: Quantization | None = None,
        sharding: ShardingChoice = None,
        progress: Progress | None = None,
    ) -> dict[WeightSpec, jax.Array]:
        """As `load_params`, flat; `dtype` None keeps every leaf's own."""
        from jaxserve.models.quantization import is_quantised

        def dtype_of(spec: WeightSpec) -> Any:
            own = dtype is None or is_quantised(spec, quantization)
            return self.weights.leaf_dtype(spec) if own else dtype

        arrays = dict(quantise(self.weights.load(dtype_of, sharding, progress), quantization))
        check_finite(arrays, self.path)
        return arrays

    def load_tokenizer(self) -> Tokenizer:
        """A tokenizer of its own; call it again for another.

        Raises:
          CheckpointError: the chat template is not valid.
        """
        import tokenizers

        from jaxserve.tokenizer import Tokenizer

        parts = self.tokenizer_parts
        try:
            # `from_parts` takes the backend over, and ours stays untouched for the next caller.
            return Tokenizer.from_parts(
                tokenizers.Tokenizer.from_str(parts.backend.to_str()),
                chat_template=parts.chat_template,
                bos_token=parts.bos_token,
                eos_token=parts.eos_token,
                add_bos=parts.add_bos,
                template_variables=parts.other_special,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a GGUF file (or a directory with just one), or a store of ours.

    Everything but the weights' values is read and checked, so what can be wrong shows before anything is loaded.

    Raises:
      CheckpointError: one line that names the file and the fault.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or directory, and not a known model name ({', '.join(KNOWN_MODELS)})"
        )
    if not path.is_dir():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: one file of a model; give the directory that holds it")
        return _open_gguf(path)
    names = sorted(entry.name for entry in path.iterdir())
    if MANIFEST_NAME in names:
        return _open_store(path)
    if "config.json" in names or any(name.endswith(".safetensors") for name in names):
        return _open_huggingface(path)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return _open_gguf(path / ggufs[0])
    if ggufs:
        raise CheckpointError(f"{path}: holds several GGUF files ({', '.join(ggufs[:4])}); name one of them")
    raise CheckpointError(
        f"{path}: holds no model (expected config.json with *.safetensors, a .gguf file, or {MANIFEST_NAME})"
    )


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    name: str | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a model of any format into our store, atomically; an existing store is replaced when all is written.

    Args:
      dtype: "float32", "bfloat16" or "float16"; None keeps each tensor's own (quantised ones become float32, which
        holds their dequantised values exactly).
      name: the model's name in the store; None is the destination's.
      origin: kept in the manifest as `source`.

    Returns:
      `destination`, as a path.

    Raises:
      CheckpointError: the source can't be read, or the destination can't be written.
    """
    source, destination = Path(source), Path(destination)
    if dtype is not None and dtype not in _STORED_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} is not supported for a store; supported: {', '.join(_STORED_DTYPES)}"
        )
    checkpoint = open_checkpoint(source)
    arrays = checkpoint.load_leaves(dtype, progress=progress)
    if progress is not None:
        progress("Writing the store", 0, 1)
    write_store(
        destination,
        name=name or destination.resolve().name,
        arrays=arrays,
        tokenizer=checkpoint.tokenizer_parts,
        config=checkpoint.hf_config,
        generation=checkpoint.hf_generation,
        stored_dtype=dtype or checkpoint.stored_dtype,
        source=origin if origin is not None else {"file": source.resolve().name, "kind": checkpoint.kind},
    )
    if progress is not None:
        progress("Writing the store", 1, 1)
    return destination


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    generation = {"eos_token_id": gguf_extra_eos(file)}
    return _assemble(
        name=path.stem,
        path=path,
        kind="gguf",
        hf_config=gguf_to_hf_config(file),
        hf_generation=generation,
        tokenizer=load_gguf_tokenizer(file),
        make_weights=lambda config, specs: GgufWeights(file, specs),
    )


def _open_huggingface(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    return _assemble(
        name=path.resolve().name,
        path=path,
        kind="huggingface",
        hf_config=read_json_object(config_file),
        hf_generation=read_optional_json_object(path / "generation_config.json"),
        tokenizer=None,
        make_weights=lambda config, specs: HuggingFaceWeights(path, specs, tied=config.tie_word_embeddings),
    )


def _open_store(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    if manifest.config.get("architectures") == [EXIT_ARCHITECTURE]:
        raise CheckpointError(
            f"{path}: is an exit and no model; its model takes it as --speculative exit:{path}"
        )
    return _assemble(
        name=manifest.name,
        path=path,
        kind="orbax",
        hf_config=manifest.config,
        hf_generation=manifest.generation,
        tokenizer=load_tokenizer_files(path / manifest.data / "tokenizer"),
        make_weights=lambda config, specs: StoreWeights(path, manifest, specs),
    )


def _assemble(
    *,
    name: str,
    path: Path,
    kind: Kind,
    hf_config: Mapping[str, Any],
    hf_generation: Mapping[str, Any],
    tokenizer: TokenizerParts | None,
    make_weights: Any,
) -> Checkpoint:
    """The checks that all formats share. The configuration comes first: the best hint at a wrong directory."""
    config_file = path / "config.json" if kind == "huggingface" else path
    config = parse_model_config(hf_config, where=str(config_file))
    parts = tokenizer if tokenizer is not None else load_tokenizer_files(path)
    check_ids_fit(parts, config.vocab_size, path)
    weights: WeightReader = make_weights(config, get_family(config.architecture).weight_specs(config))
    generation = parse_generation_defaults(
        hf_generation,
        hf_config,
        where=str(path / "generation_config.json" if kind == "huggingface" else path),
        vocab_size=config.vocab_size,
        tokenizer_eos=parts.token_id(parts.eos_token),
        tokenizer_bos=parts.token_id(parts.bos_token),
    )
    if not generation.eos_token_ids:
        logger.warning(
            "%s: no end-of-text id is known; replies end only at max_tokens or a stop string", path
        )
    return Checkpoint(
        name=name,
        path=path,
        kind=kind,
        config=config,
        generation=generation,
        stored_dtype=main_dtype(weights),
        hf_config=hf_config,
        hf_generation=hf_generation,
        weights=weights,
        tokenizer_parts=parts,
    )
