"""GGUF files (F32, F16, BF16 and the quantised types that the `gguf` package can dequantise).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Dimensions there are listed innermost first; the
arrays of the `gguf` package are in the usual order already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import ml_dtypes
import numpy as np

from jaxserve.checkpoint.gguf_rope import llama3_rope_from_factors
from jaxserve.checkpoint.weights import TensorInfo, check_tensors, load_from_host
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec

if TYPE_CHECKING:
    import jax

    from jaxserve.checkpoint.weights import DtypeChoice, ShardingChoice
    from jaxserve.progress import Progress

_MAGIC = b"GGUF"
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_FLOATS = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Frequency factors of llama3 scaling: turned into the config's rope settings, not a parameter.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF: metadata as Python values, and tensors by name. Tensor data stay on disk until read."""

    def __init__(self, path: Path) -> None:
        """Raises:
        CheckpointError: not a GGUF, truncated, damaged, or one part of a split model.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        if magic != _MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file (it begins with {magic!r})")
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."
            }
            self._float32_keys = {
                name
                for name, field in reader.fields.items()
                if field.types and field.types[-1] == gguf.GGUFValueType.FLOAT32
            }
        except (
            Exception
        ) as error:  # the package has no error type of its own: anything can come out of a bad file
            raise CheckpointError(f"{path}: truncated or damaged GGUF ({_one_line(error)})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{path}: one part of a split GGUF; merge the parts into one file first")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value. A 32-bit float becomes the shortest decimal that names it: 1e-05, not 9.9999997e-06."""
        value = self.metadata.get(key, default)
        if key in self._float32_keys and isinstance(value, float):
            return float(str(np.float32(value)))
        return value

    def tensor_infos(self) -> dict[str, TensorInfo]:
        """Shapes (outermost first) and exact types by tensor name."""
        infos = {}
        for name, tensor in self._tensors.items():
            exact = _FLOATS.get(tensor.tensor_type, np.dtype(np.float32))
            infos[name] = TensorInfo(tuple(int(n) for n in reversed(tensor.shape)), exact.name, self.path)
        return infos

    def is_quantised(self, name: str) -> bool:
        return self._tensors[name].tensor_type not in _FLOATS

    def read(self, name: str) -> np.ndarray:
        """One tensor: floats as stored, quantised types dequantised to float32.

        Raises:
          CheckpointError: a type that can't be dequantised.
        """
        tensor = self._tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        dtype = _FLOATS.get(tensor.tensor_type)
        if dtype is not None:
            return np.array(tensor.data).view(dtype).reshape(shape)  # a copy: the file is mapped
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {name} has type {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error


class GgufWeights:
    """The model's parameters in a GGUF file; see `WeightReader`."""

    def __init__(self, file: GgufFile, specs: Sequence[WeightSpec]) -> None:
        """Raises:
        CheckpointError: tensors missing, of another shape, or too many.
        """
        self.file = file
        self._infos = file.tensor_infos()
        check_tensors(
            specs,
            self._infos,
            name_of=lambda spec: spec.gguf_name,
            where=file.path,
            expected_by="its metadata",
            ignored=lambda name: name == _ROPE_FACTORS,
        )
        self.specs = [spec for spec in specs if spec.gguf_name in self._infos]

    def leaf_dtype(self, spec: WeightSpec) -> str:
        return self._infos[spec.gguf_name].dtype

    def read(self, spec: WeightSpec) -> np.ndarray:
        array = self.file.read(spec.gguf_name)
        if spec.gguf_rope_heads is not None:
            array = uninterleave_rope_rows(array, spec.gguf_rope_heads)
        return array

    def load(
        self, dtype_of: DtypeChoice, sharding: ShardingChoice, progress: Progress | None
    ) -> Iterator[tuple[WeightSpec, jax.Array]]:
        return load_from_host(self, self.read, dtype_of, sharding, progress)


def uninterleave_rope_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q/k rows.

    llama.cpp rotates neighbouring pairs (0,1), (2,3), ...; Hugging Face rotates i with i + head_dim/2. Its converter
    therefore moves row i of a head's first half to 2i and of the second half to 2i+1.

    Args:
      array: [num_heads * head_dim, in], or [num_heads * head_dim] for a bias.
    """
    rows, rest = array.shape[0], array.shape[1:]
    paired = array.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, *rest)


def gguf_to_hf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata in the spelling of a Hugging Face `config.json`.

    `vocab_size` is the number of rows of the token embedding; a model is tied when it has no `output.weight`; bias
    flags follow from the tensors that are there.

    Raises:
      CheckpointError: a needed key is missing, or the file asks for something that we don't have.
    """
    arch = file.get("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(
            f"{file.path}: unknown architecture {arch!r} (general.architecture); supported: {known}"
        )

    def value(key: str, default: Any = None, *, required: bool = False) -> Any:
        found = file.get(f"{arch}.{key}", default)
        if isinstance(found, list):
            if len(set(found)) != 1:
                raise CheckpointError(
                    f"{file.path}: {arch}.{key} differs between layers, which is not supported"
                )
            found = found[0]
        if found is None and required:
            raise CheckpointError(f"{file.path}: the metadata key {arch}.{key} is missing")
        return found

    infos = file.tensor_infos()
    embedding = infos.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    if value("expert_count", 0):
        raise CheckpointError(f"{file.path}: a mixture of experts ({arch}.expert_count) is not supported")
    heads = value("attention.head_count", required=True)
    width = value("embedding_length", required=True)
    head_dim = value("attention.key_length") or value("rope.dimension_count") or width // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if value(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {arch}.{key} {value(key)} differs from the head size {head_dim}"
            )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length", required=True),
        "num_hidden_layers": value("block_count", required=True),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length", required=True),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon", required=True),
        "hidden_act": "silu",
        "sliding_window": value("attention.sliding_window"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, value, head_dim),
        "tie_word_embeddings": "output.weight" not in infos,
        "attention_bias": "blk.0.attn_q.bias" in infos,
        "mlp_bias": "blk.0.ffn_up.bias" in infos,
    }
    for key in ("bos_token_id", "eos_token_id"):
        config[key] = file.get(f"tokenizer.ggml.{key}")
    return config


def gguf_extra_eos(file: GgufFile) -> list[int]:
    """Every id that the file marks as an end: of text, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _rope_scaling(file: GgufFile, value: Any, head_dim: int) -> Mapping[str, Any] | None:
    kind = value("rope.scaling.type", "none")
    factor = value("rope.scaling.factor")
    if kind == "none" and value("rope.scale_linear"):  # the key of early files
        kind, factor = "linear", value("rope.scale_linear")
    if _ROPE_FACTORS in file.tensor_infos():
        if kind != "none":
            raise CheckpointError(
                f"{file.path}: {_ROPE_FACTORS} together with {kind} scaling is not supported"
            )
        factors = np.asarray(file.read(_ROPE_FACTORS), dtype=np.float64).reshape(-1)
        theta = float(value("rope.freq_base", 10000.0))
        scaling = llama3_rope_from_factors(factors, theta, head_dim)
        if scaling is None:
            raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} does not follow the llama3 rule")
        return scaling
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    context = value("context_length", required=True)
    original = value("rope.scaling.original_context_length")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if value("rope.scaling.attn_factor", 1.0) != 1.0:
            raise CheckpointError(f"{file.path}: rope.scaling.attn_factor other than 1 is not supported")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or context,
            "beta_fast": value("rope.scaling.yarn_beta_fast"),
            "beta_slow": value("rope.scaling.yarn_beta_slow"),
        }
    raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not supported")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
