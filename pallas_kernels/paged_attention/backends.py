"""The backends by name, and the choice of one. A backend's module is imported when it is first asked for, so that one
that a JAX version lacks hurts nobody who does not use it."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

from pallas_kernels.paged_attention.spec import AttentionSpec, DeviceFacts
from pallas_kernels.paged_attention.tuning import TuningConfig, find_config, shape_class

logger = logging.getLogger("pallas_kernels.paged_attention")

_MODULES = {
    "xla": "pallas_kernels.paged_attention.xla",
    "cpu-native": "pallas_kernels.paged_attention.cpu_native",
    "pallas-triton": "pallas_kernels.paged_attention.pallas_triton",
    "pallas-mosaic-gpu": "pallas_kernels.paged_attention.pallas_mosaic_gpu",
}
_FASTEST_FIRST = ("pallas-mosaic-gpu", "pallas-triton")  # on a GPU
_CPU_NATIVE = "cpu-native"
_INTERPRET = "-interpret"
_ANY_INTERPRETED = "pallas-interpret"
_INTERPRETED = tuple(name + _INTERPRET for name in _FASTEST_FIRST)


@dataclass(frozen=True)
class Backend:
    """A backend, ready for one kind of call. Static: part of what is traced.

    Attributes:
      name: as `backend_names` lists it.
      interpret: run a GPU kernel's code on the CPU, slowly, to debug it.
      tuning: tile sizes; None on a CPU.
      max_splits: most splits of a decode row's context. A row's split depends on its own length alone.
      deterministic: a row's bits are a function of its own sequence alone, also whether it is decoded or part of a
        prefill chunk.
    """

    name: str
    interpret: bool = False
    tuning: TuningConfig | None = None
    max_splits: int = 1
    deterministic: bool = False


XLA = Backend("xla")


def backend_names() -> tuple[str, ...]:
    """Names that `resolve_backend` takes besides "auto"."""
    return (*_MODULES, *_INTERPRETED, _ANY_INTERPRETED)


def resolve_backend(
    name: str, *, spec: AttentionSpec, device: DeviceFacts, deterministic: bool = False
) -> Backend:
    """The backend that runs for `name`: "auto" is the fastest that supports the call.

    Args:
      deterministic: see `Backend`. Only those for a CPU can promise that so far.

    Raises:
      ValueError: no backend of that name exists; the text lists those that do.
      NotImplementedError: the one named can't run the call; the text says what it supports.
    """
    candidates: tuple[str, ...]
    if name == "auto":
        candidates = {"gpu": (*_FASTEST_FIRST, "xla"), "cpu": (_CPU_NATIVE, "xla")}.get(
            device.platform, ("xla",)
        )
    elif name == _ANY_INTERPRETED:
        candidates = _INTERPRETED
    elif name in backend_names():
        candidates = (name,)
    else:
        raise ValueError(
            f"unknown attention backend {name!r}; choose from: auto, {', '.join(backend_names())}"
        )
    for candidate in candidates:
        try:
            backend = _prepare(candidate, spec, device, deterministic)
        except NotImplementedError as error:
            if candidate == candidates[-1]:
                raise
            logger.warning("attention backend %s is not used: %s", candidate, error)
        else:
            logger.info("attention backend: %s%s", candidate, f", {backend.tuning}" if backend.tuning else "")
            return backend
    raise AssertionError("unreachable: the last candidate returns or raises")


def module_of(backend: Backend) -> ModuleType:
    """The module that implements a backend.

    Raises:
      NotImplementedError: this version of JAX lacks what it is written with.
    """
    try:
        return importlib.import_module(_MODULES[backend.name])
    except ImportError as error:
        raise NotImplementedError(
            f"{backend.name} does not load with this version of JAX: {error}"
        ) from error


def _prepare(name: str, spec: AttentionSpec, device: DeviceFacts, deterministic: bool) -> Backend:
    interpret = name.endswith(_INTERPRET)
    name = name.removesuffix(_INTERPRET)
    if deterministic and (name not in ("xla", _CPU_NATIVE) or device.platform != "cpu"):
        raise NotImplementedError(
            f"{name} on a {device.platform} promises no bit-equal results: deterministic mode needs {_CPU_NATIVE} or "
            "xla, on a cpu"
        )
    if name == "xla":
        return Backend("xla", deterministic=deterministic)
    if name == _CPU_NATIVE:
        module_of(Backend(name)).check(spec, device)
        return Backend(name, deterministic=deterministic)
    if not interpret and device.platform != "gpu":
        raise NotImplementedError(
            f"{name} needs an NVIDIA GPU, this is a {device.platform}; {name}{_INTERPRET} runs its code slowly here"
        )
    module = module_of(Backend(name))
    module.check(spec, device, interpret=interpret)
    tuning = find_config(name, shape_class(spec, device))
    return Backend(name, interpret, tuning, _max_splits(spec, device))


def _max_splits(spec: AttentionSpec, device: DeviceFacts) -> int:
    """Enough that one sequence alone can occupy every SM; a power of two from 2 to 32."""
    wanted = -(-(device.num_sms or 8) // spec.num_kv_heads)
    return max(2, min(32, 1 << (wanted - 1).bit_length()))
