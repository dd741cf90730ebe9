"""Our own store: one directory a model, weights in an Orbax checkpoint that restores straight onto the device.

    <store>/
      jaxserve.json         the manifest; written last, names the data folder
      data-<id>/params/     Orbax (OCDBT) checkpoint: a flat dict, Hugging Face tensor name -> array
      data-<id>/tokenizer/  tokenizer.json, tokenizer_config.json (with the chat template), generation_config.json

Leaves are named as in Hugging Face files, not as in our module tree, so that a store outlives a refactoring.

How writing is safe: data go into a folder of their own that nothing refers to; only when they are complete and on
disk does one `os.replace` of the manifest make them the model. Killed earlier, the previous manifest and its data
are untouched, and the leftover is removed by the next writer. Writers of one store exclude each other by a lock that
ends with their process.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve import file_lock
from jaxserve.checkpoint.json_file import read_json_object
from jaxserve.checkpoint.tokenizer_files import save_tokenizer_files
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.checkpoint.weights import TensorInfo, check_tensors, sharding_of, summarise
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec

if TYPE_CHECKING:
    import jax

    from jaxserve.checkpoint.weights import DtypeChoice, ShardingChoice
    from jaxserve.progress import Progress

MANIFEST_NAME = "jaxserve.json"
FORMAT_VERSION = 1
_DATA_PREFIX = "data-"
_UNFINISHED_PREFIX = f".{MANIFEST_NAME}."
_LOCK = ".lock"
_PART_BYTES = 256 << 20  # restored at a time


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store says about itself.

    Attributes:
      name: the model's name.
      config: as a Hugging Face `config.json`.
      generation: as a `generation_config.json`.
      leaves: every array of the checkpoint.
      data: name of the folder that holds params and tokenizer.
      source: where it came from, e.g. ``{"file": ..., "sha256": ...}``; free for the writer's use.
      made_by: version of the program that wrote it.
    """

    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    stored_dtype: str
    leaves: Mapping[str, Leaf]
    data: str
    source: Mapping[str, Any] = field(default_factory=dict)
    made_by: str = ""
    format_version: int = FORMAT_VERSION


def is_store(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def read_manifest(store: Path) -> Manifest:
    """Raises:
    CheckpointError: no manifest (an unfinished or foreign directory), a damaged one, or one of a newer format.
    """
    path = store / MANIFEST_NAME
    values = read_json_object(path)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: store format {version!r}, this version reads {FORMAT_VERSION}; convert the model again"
        )
    try:
        leaves = {
            name: Leaf(shape=tuple(int(n) for n in leaf["shape"]), dtype=str(leaf["dtype"]))
            for name, leaf in values["leaves"].items()
        }
        manifest = Manifest(**{**values, "leaves": leaves})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged manifest ({error})") from error
    if not isinstance(manifest.data, str) or Path(manifest.data).name != manifest.data:
        raise CheckpointError(f"{path}: damaged manifest (data is {manifest.data!r}, not a folder's name)")
    if not isinstance(manifest.config, dict) or not isinstance(manifest.generation, dict):
        raise CheckpointError(f"{path}: damaged manifest (config and generation must be objects)")
    if not (store / manifest.data).is_dir():
        raise CheckpointError(
            f"{store / manifest.data}: the data folder is missing ({MANIFEST_NAME} names it)"
        )
    return manifest


def write_store(
    store: Path,
    *,
    name: str,
    arrays: Mapping[WeightSpec, jax.Array],
    tokenizer: TokenizerParts | None,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    stored_dtype: str,
    source: Mapping[str, Any],
) -> None:
    """Make `store` hold this model, replacing what it held; see the module's text for what happens on a crash.

    Args:
      tokenizer: None for what has none of its own (`checkpoint.exit_store`).

    Raises:
      CheckpointError: the place can't be written, or holds something that is not a store.
    """
    if store.exists() and not is_store(store) and any(not _is_ours(entry) for entry in _entries(store)):
        raise CheckpointError(f"{store}: already exists and is not a model store; choose another destination")
    try:
        store.mkdir(parents=True, exist_ok=True)
        with file_lock.exclusive(store / _LOCK):
            _remove_leftovers(store)
            data = store / f"{_DATA_PREFIX}{secrets.token_hex(6)}"
            manifest = Manifest(
                name=name,
                config=config,
                generation=generation,
                stored_dtype=stored_dtype,
                leaves={s.hf_name: Leaf(tuple(a.shape), a.dtype.name) for s, a in arrays.items()},
                data=data.name,
                source=source,
                made_by=_version(),
            )
            try:
                _write_data(data, arrays, tokenizer, generation)
                unfinished = store / f"{_UNFINISHED_PREFIX}{data.name}"
                _write_json(unfinished, asdict(manifest))
                os.replace(unfinished, store / MANIFEST_NAME)
            except BaseException:
                shutil.rmtree(data, ignore_errors=True)
                raise
            _sync(store)
            _remove_leftovers(store)
    except OSError as error:
        raise CheckpointError(f"{store}: cannot be written ({error.strerror or error})") from error


def _write_data(
    data: Path,
    arrays: Mapping[WeightSpec, jax.Array],
    tokenizer: TokenizerParts | None,
    generation: Mapping[str, Any],
) -> None:
    import orbax.checkpoint as ocp

    data.mkdir()
    tree = {spec.hf_name: array for spec, array in arrays.items()}
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save((data / "params").absolute(), args=ocp.args.PyTreeSave(tree))
    except ValueError as error:  # tensorstore's way of saying "no space left on device"
        raise CheckpointError(f"{data}: cannot be written ({_one_line(error)})") from error
    if tokenizer is not None:
        save_tokenizer_files(tokenizer, data / "tokenizer")
        _write_json(data / "tokenizer" / "generation_config.json", generation)
    _sync_tree(data)


class StoreWeights:
    """The model's parameters in a store; see `WeightReader`."""

    def __init__(self, store: Path, manifest: Manifest, specs: Sequence[WeightSpec]) -> None:
        """Raises:
        CheckpointError: the manifest's leaves are not those of its own config.
        """
        self.store = store
        self._manifest = manifest
        manifest_path = store / MANIFEST_NAME
        check_tensors(
            specs,
            {
                name: TensorInfo(leaf.shape, leaf.dtype, manifest_path)
                for name, leaf in manifest.leaves.items()
            },
            name_of=lambda spec: spec.hf_name,
            where=manifest_path,
            expected_by="its config",
        )
        self.specs = [spec for spec in specs if spec.hf_name in manifest.leaves]

    def leaf_dtype(self, spec: WeightSpec) -> str:
        return self._manifest.leaves[spec.hf_name].dtype

    def load(
        self, dtype_of: DtypeChoice, sharding: ShardingChoice, progress: Progress | None
    ) -> Iterator[tuple[WeightSpec, jax.Array]]:
        """Orbax reads every device's part straight into place and casts on the way, `_PART_BYTES` at a time."""
        data = (self.store / self._manifest.data).absolute()
        if progress is not None:
            progress("Loading weights", 0, len(self.specs))
        try:
            with file_lock.shared(data), _checkpointer() as checkpointer:
                self._check_tree(checkpointer, data / "params")
                done = 0
                for part in self._parts():
                    arrays = self._restore(checkpointer, data / "params", part, dtype_of, sharding)
                    while arrays:
                        yield arrays.popitem()
                    done += len(part)
                    if progress is not None:
                        progress("Loading weights", done, len(self.specs))
        except (OSError, CheckpointError) as error:
            if self._is_replaced():  # then its data is being removed, or has been
                raise CheckpointError(
                    f"{self.store}: the model was replaced while it was being opened; open it again"
                ) from error
            if isinstance(error, OSError):
                raise CheckpointError(f"{data}: cannot be read ({error.strerror or error})") from error
            raise

    def _is_replaced(self) -> bool:
        """Whether the manifest names other data by now, or is gone with it."""
        try:
            return read_json_object(self.store / MANIFEST_NAME).get("data") != self._manifest.data
        except CheckpointError:
            return not (self.store / self._manifest.data).is_dir()

    def _parts(self) -> Iterator[list[WeightSpec]]:
        """The leaves in groups of `_PART_BYTES` as stored, or a single larger one."""
        import jax.numpy as jnp

        part: list[WeightSpec] = []
        size = 0
        for spec in self.specs:
            leaf = math.prod(spec.shape) * jnp.dtype(self.leaf_dtype(spec)).itemsize
            if part and size + leaf > _PART_BYTES:
                yield part
                part, size = [], 0
            part.append(spec)
            size += leaf
        if part:
            yield part

    def _restore(
        self,
        checkpointer: Any,
        path: Path,
        specs: Sequence[WeightSpec],
        dtype_of: DtypeChoice,
        sharding: ShardingChoice,
    ) -> dict[WeightSpec, jax.Array]:
        import jax
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        item, restore_args = {}, {}
        for spec in specs:
            placed = sharding_of(sharding, spec)
            wanted = jnp.dtype(dtype_of(spec))
            item[spec.hf_name] = jax.ShapeDtypeStruct(spec.shape, wanted, sharding=placed)
            restore_args[spec.hf_name] = ocp.ArrayRestoreArgs(
                sharding=placed, global_shape=spec.shape, dtype=wanted, strict=True
            )
        try:
            restored = checkpointer.restore(
                path, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            )
        except Exception as error:  # tensorstore and Orbax raise ValueError, OSError, and types of their own
            raise CheckpointError(f"{path}: damaged checkpoint ({_one_line(error)})") from error
        return {spec: restored[spec.hf_name] for spec in specs}

    def _check_tree(self, checkpointer: Any, path: Path) -> None:
        """The checkpoint itself must hold what the manifest lists: Orbax alone would truncate or pad a leaf."""
        try:
            stored = dict(checkpointer.metadata(path).item_metadata.tree)
        except Exception as error:  # as above
            raise CheckpointError(f"{path}: damaged checkpoint ({_one_line(error)})") from error
        differences = [f"{name} is missing" for name in self._manifest.leaves if name not in stored]
        differences += [
            f"{name} is not in {MANIFEST_NAME}" for name in stored if name not in self._manifest.leaves
        ]
        for name, leaf in self._manifest.leaves.items():
            if name in stored and tuple(stored[name].shape) != leaf.shape:
                differences.append(
                    f"{name} has shape {list(stored[name].shape)}, {MANIFEST_NAME} says {list(leaf.shape)}"
                )
        if differences:
            raise CheckpointError(f"{path}: {summarise(differences)}")


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # Uncompressed: zstd made saving 2.5 times slower, and random-looking mantissas hardly shrink.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _remove_leftovers(store: Path) -> None:
    """Data folders and half-written manifests that the manifest does not name. Call with the lock held."""
    manifest = store / MANIFEST_NAME
    try:
        current = read_json_object(manifest).get("data") if manifest.exists() else None
    except CheckpointError:
        return  # damaged: remove nothing before there is a sound one
    for entry in _entries(store):
        if entry.name.startswith(_DATA_PREFIX) and entry.name != current:
            if not file_lock.in_use(entry):  # a process that still loads from it; the next writer removes it
                shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(_UNFINISHED_PREFIX):
            entry.unlink(missing_ok=True)


def _entries(store: Path) -> list[Path]:
    return list(store.iterdir()) if store.is_dir() else [store]


def _is_ours(entry: Path) -> bool:
    return entry.name.startswith((_DATA_PREFIX, _UNFINISHED_PREFIX)) or entry.name == _LOCK


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1, ensure_ascii=False)
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(directory: Path) -> None:
    """The data must be on disk before the manifest that refers to them is."""
    for root, _, names in os.walk(directory):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version() -> str:
    from importlib import metadata

    try:
        return f"jaxserve {metadata.version('jaxserve')}"
    except metadata.PackageNotFoundError:
        return "jaxserve (not installed)"


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
