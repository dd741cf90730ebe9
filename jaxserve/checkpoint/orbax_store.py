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

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.checkpoint.json_file import read_json_object
from jaxserve.checkpoint.tokenizer_files import save_tokenizer_files
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.checkpoint.weights import TensorInfo, check_tensors, sharding_of, summarise
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec

if TYPE_CHECKING:
    import jax

    from jaxserve.checkpoint.weights import ShardingChoice
    from jaxserve.progress import Progress

MANIFEST_NAME = "jaxserve.json"
FORMAT_VERSION = 1
_DATA_PREFIX = "data-"


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
    tokenizer: TokenizerParts,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    stored_dtype: str,
    source: Mapping[str, Any],
) -> None:
    """Make `store` hold this model, replacing what it held; see the module's text for what happens on a crash.

    Raises:
      CheckpointError: the place can't be written, or holds something that is not a store.
    """
    if store.exists() and not is_store(store) and any(not _is_ours(entry) for entry in _entries(store)):
        raise CheckpointError(f"{store}: already exists and is not a model store; choose another destination")
    try:
        store.mkdir(parents=True, exist_ok=True)
        with _lock(store):
            _remove_leftovers(store)
            data = store / f"{_DATA_PREFIX}{secrets.token_hex(6)}"
            data.mkdir()
            _save_params(data / "params", {spec.hf_name: array for spec, array in arrays.items()})
            save_tokenizer_files(tokenizer, data / "tokenizer")
            _write_json(data / "tokenizer" / "generation_config.json", generation)
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
            _sync_tree(data)
            _write_json(store / f".{MANIFEST_NAME}.{data.name}", asdict(manifest))
            os.replace(store / f".{MANIFEST_NAME}.{data.name}", store / MANIFEST_NAME)
            _sync(store)
            _remove_leftovers(store)
    except OSError as error:
        raise CheckpointError(f"{store}: cannot be written ({error.strerror or error})") from error


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
        self, dtype: Any, sharding: ShardingChoice, progress: Progress | None
    ) -> dict[WeightSpec, jax.Array]:
        """Orbax reads every device's part straight into place and casts on the way."""
        import jax
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        path = (self.store / self._manifest.data / "params").absolute()
        if progress is not None:
            progress("Loading weights", 0, len(self.specs))
        with _checkpointer() as checkpointer:
            self._check_tree(checkpointer, path)
            item, restore_args = {}, {}
            for spec in self.specs:
                placed = sharding_of(sharding, spec)
                wanted = jnp.dtype(dtype or self.leaf_dtype(spec))
                item[spec.hf_name] = jax.ShapeDtypeStruct(spec.shape, wanted, sharding=placed)
                restore_args[spec.hf_name] = ocp.ArrayRestoreArgs(
                    sharding=placed, global_shape=spec.shape, dtype=wanted, strict=True
                )
            try:
                restored = checkpointer.restore(
                    path, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
                )
            except (
                Exception
            ) as error:  # tensorstore and Orbax raise ValueError, OSError, and types of their own
                raise CheckpointError(f"{path}: damaged checkpoint ({_one_line(error)})") from error
        if progress is not None:
            progress("Loading weights", len(self.specs), len(self.specs))
        return {spec: restored[spec.hf_name] for spec in self.specs}

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


def _save_params(path: Path, arrays: Mapping[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))


@contextmanager
def _lock(store: Path) -> Iterator[None]:
    """One writer a store; the lock dies with its process, so a kill leaves nothing to clean."""
    with open(store / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(store: Path) -> None:
    """Data folders and half-written manifests that the manifest does not name. Call with the lock held."""
    manifest = store / MANIFEST_NAME
    current = read_json_object(manifest).get("data") if manifest.exists() else None
    for entry in _entries(store):
        if entry.name.startswith(_DATA_PREFIX) and entry.name != current:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(f".{MANIFEST_NAME}."):
            entry.unlink(missing_ok=True)


def _entries(store: Path) -> list[Path]:
    return list(store.iterdir()) if store.is_dir() else [store]


def _is_ours(entry: Path) -> bool:
    return entry.name.startswith((_DATA_PREFIX, f".{MANIFEST_NAME}.")) or entry.name == ".lock"


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
