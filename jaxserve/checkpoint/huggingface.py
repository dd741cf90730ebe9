"""Hugging Face model directories: one `*.safetensors` file, or shards with an index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoint.json_file import read_json_object
from jaxserve.checkpoint.weights import TensorInfo, check_tensors, load_from_host
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec

if TYPE_CHECKING:
    import jax

    from jaxserve.checkpoint.weights import DtypeChoice, ShardingChoice
    from jaxserve.progress import Progress

logger = logging.getLogger("jaxserve.checkpoint")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def find_weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the model.

    Which: those that `model.safetensors.index.json` names; else `model.safetensors`; else the only
    `*.safetensors` there is. Other formats (`*.bin`, `original/`, `consolidated.*`) are left alone, but a
    `model*.safetensors` that is not part of the choice is an error: nobody can say which of the two is meant.

    Raises:
      CheckpointError: none, a missing shard, stray files, a damaged index.
    """
    found = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("."))
    index = directory / _INDEX
    if index.exists() or index.is_symlink():
        chosen = [directory / name for name in sorted(set(_weight_map(index).values()))]
        for path in chosen:
            if not path.exists():
                raise CheckpointError(f"{path}: the shard is missing ({_INDEX} names it)")
    elif directory / _SINGLE in found or (directory / _SINGLE).is_symlink():
        chosen = [directory / _SINGLE]
    elif len(found) == 1:
        chosen = found
    elif not found:
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" (only {pickles[0]}: convert it to safetensors first)" if pickles else ""
        raise CheckpointError(f"{directory}: holds no *.safetensors file{hint}")
    else:
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(f"{directory}: {_INDEX} is missing, so the shards {names} cannot be told apart")
    stray = [path.name for path in found if path not in chosen and path.name.startswith("model")]
    if stray:
        raise CheckpointError(
            f"{directory / stray[0]}: a stray weight file; the model is in "
            f"{_INDEX if index.exists() else chosen[0].name} (remove the one that is not wanted)"
        )
    return chosen


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name} is said to be in {file!r}, which is not a file name")
    return weight_map


class HuggingFaceWeights:
    """The model's parameters in a directory of safetensors; see `WeightReader`.

    Tied embeddings: a model whose config ties them has no head of its own, so a `lm_head.weight` in the file is not
    used. Where it differs from the embedding, the embedding wins (as in transformers) and a warning says so.
    """

    def __init__(self, directory: Path, specs: Sequence[WeightSpec], *, tied: bool) -> None:
        """Raises:
        CheckpointError: files missing, truncated or stray; tensors missing, of another shape, or too many.
        """
        self.directory = directory
        self.specs = list(specs)
        files = find_weight_files(directory)
        self._infos: dict[str, TensorInfo] = {}
        for path in files:
            for name, info in _read_header(path).items():
                if name in self._infos:
                    raise CheckpointError(f"{path}: {name} is in {self._infos[name].file.name} as well")
                self._infos[name] = info
        index = directory / _INDEX
        if index.exists():
            self._check_index(_weight_map(index))
        check_tensors(
            specs,
            self._infos,
            name_of=lambda spec: spec.hf_name,
            where=files[0] if len(files) == 1 else directory,
            expected_by="config.json",
            ignored=lambda name: tied and name == _LM_HEAD,
        )
        self.specs = [spec for spec in specs if spec.hf_name in self._infos]
        if tied and _LM_HEAD in self._infos:
            self._compare_tied()

    def leaf_dtype(self, spec: WeightSpec) -> str:
        return self._infos[spec.hf_name].dtype

    def load(
        self, dtype_of: DtypeChoice, sharding: ShardingChoice, progress: Progress | None
    ) -> Iterator[tuple[WeightSpec, jax.Array]]:
        with ExitStack() as stack:
            read = self._reader(stack)
            yield from load_from_host(self, lambda spec: read(spec.hf_name), dtype_of, sharding, progress)

    def _reader(self, stack: ExitStack) -> Callable[[str], np.ndarray]:
        """Reads tensors by name; every file is opened once, on first use, and closed with `stack`."""
        opened: dict[Path, Any] = {}

        def read(name: str) -> np.ndarray:
            path = self._infos[name].file
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="np"))
                return opened[path].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: {name} cannot be read ({error})") from error

        return read

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            info = self._infos.get(name)
            if info is None or info.file.name != file:
                raise CheckpointError(
                    f"{self.directory / file}: {name} is missing ({_INDEX} places it there)"
                )

    def _compare_tied(self) -> None:
        with ExitStack() as stack:
            read = self._reader(stack)
            head, embedding = read(_LM_HEAD), read(_EMBEDDING)
        if head.shape != embedding.shape or not np.array_equal(head, embedding):
            logger.warning(
                "%s: lm_head.weight differs from the embedding, but config.json says that the two are tied; "
                "the embedding is used for both",
                self._infos[_LM_HEAD].file,
            )


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and types; the library checks that the file is as long as its header says."""
    infos = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_slice(name)
                dtype = _DTYPES.get(tensor.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{path}: {name} has type {tensor.get_dtype()}; supported: {', '.join(_DTYPES)}"
                    )
                exact = "float32" if dtype == np.float64 else dtype.name
                infos[name] = TensorInfo(tuple(tensor.get_shape()), exact, path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or damaged safetensors ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return infos
