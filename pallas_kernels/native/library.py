"""C++ for CPUs that compiled XLA programs call: built by the machine's own C++ compiler on first use, and kept.

It is kept under a name that depends on the source, the compiler, the flags, the CPU and jaxlib, in a folder that only
this user may write to, with its checksum beside it. Several processes may build it at once: each renames its own
files into place.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

_INCLUDE = Path(__file__).parents[1]
_SOURCES = ("paged_attention/cpu_native.cc", "linear/cpu_native.cc")
_HEADERS = (
    "native/vectors.h",
    "native/threads.h",
    "linear/panels.h",
    "linear/tokens.h",
    "linear/tasks.h",
    "linear/cpu_native.h",
    "linear/int8_panels.h",
    "paged_attention/cpu_native.h",
)
_TARGETS = (
    "paged_attention_float32",
    "paged_attention_bfloat16",
    "linear_float32_float32",
    "linear_bfloat16_bfloat16",
    "linear_bfloat16_float32",
    "linear_panels_float32",
    "linear_panels_bfloat16",
    "linear_int8_panels_float32",
    "linear_int8_panels_bfloat16",
)

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
_TIMEOUT_SECONDS = 300
_VERSION_TIMEOUT_SECONDS = 20

_LOADING = threading.Lock()


def load() -> None:
    """Register the library's functions with XLA under their own names; once a process.

    Raises:
      NotImplementedError: it can't be built or loaded here; the text says why.
    """
    with _LOADING:  # XLA refuses a second function under a name, and two builds are two libraries
        _load()


@functools.cache
def _load() -> None:
    compiler = _compiler()
    try:
        path = _folder() / f"jaxserve-{_digest(compiler)}.so"
        if not _is_whole(path):
            _build(compiler, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotImplementedError(f"its library can't be built or loaded: {error}") from error
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _compiler() -> tuple[str, ...]:
    """As words: $CXX may hold flags, or a launcher such as ccache."""
    given = os.environ.get("CXX", "").strip()
    if shutil.which(given):  # its path may have spaces in it
        return (given,)
    try:
        compiler = tuple(shlex.split(given)) or tuple(filter(shutil.which, _COMPILERS))[:1]
    except ValueError as error:
        raise NotImplementedError(f"CXX is {given!r}: {error}") from error
    if not compiler:
        raise NotImplementedError("there is no C++ compiler (g++ or clang++) to build it with")
    return compiler


def _folder() -> Path:
    """Raises OSError: it can't be made, or somebody else could put a library there."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # neither $HOME nor an entry in the system's list of users
        raise FileNotFoundError(f"{error} Set HOME or XDG_CACHE_HOME.") from error
    folder = Path(base) / "jaxserve" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: must belong to this user, and nobody else may write there")
    return folder


def _is_whole(path: Path) -> bool:
    try:
        return _checksum(path).encode() == _checksum_file(path).read_bytes()
    except FileNotFoundError:
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(compiler: tuple[str, ...]) -> str:
    version = _run([*compiler, "--version"], _VERSION_TIMEOUT_SECONDS).stdout
    sources = [(_INCLUDE / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    facts = (
        *sources,
        version.encode(),
        repr((compiler, _FLAGS)).encode(),
        _cpu().encode(),
        jaxlib.__version__.encode(),
    )
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _build(compiler: tuple[str, ...], path: Path) -> None:
    """Raises OSError or NotImplementedError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        include = ("-I", str(_INCLUDE), "-I", jax.ffi.include_dir())

        def compile_object(number: int) -> str:
            made = f"{folder}/{number}.o"
            source = str(_INCLUDE / _SOURCES[number])
            _run_compiler(compiler, *_FLAGS, *include, "-c", source, "-o", made)
            return made

        with ThreadPoolExecutor() as pool:  # a process each: it takes seconds, most of them for XLA's headers
            objects = list(pool.map(compile_object, range(len(_SOURCES))))
        built = Path(folder) / path.name
        _run_compiler(compiler, *_FLAGS, "-shared", *objects, "-o", str(built))
        checksum = _checksum_file(built)
        checksum.write_text(_checksum(built))
        checksum.replace(_checksum_file(path))
        built.replace(path)


def _run_compiler(compiler: tuple[str, ...], *arguments: str) -> None:
    """Raises OSError or NotImplementedError."""
    done = _run([*compiler, *arguments], _TIMEOUT_SECONDS)
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise NotImplementedError(
            f"{shlex.join(compiler)} could not build it: {said or f'exit code {done.returncode}'}"
        )


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Raises OSError or NotImplementedError: it takes too long."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise NotImplementedError(f"{command[0]} took more than {seconds} s") from error
