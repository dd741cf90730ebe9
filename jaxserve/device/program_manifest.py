"""The manifest of compiled programs: everything that decides what they are, as plain JSON; and how two differ."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib

# What JAX's configuration says about this process, not about its programs.
_NOT_OF_PROGRAMS = {"jax_platforms", "jax_cuda_visible_devices", "jax_traceback_filtering"}
_PLUGINS = tuple(f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt"))
_LONGEST_VALUE = 40  # characters of a value in a message
_MOST_DIFFERENCES = 4  # in a message
_MOST_OF_A_MODEL = 2  # fields of a model that differ, before it is called another one


@dataclass(frozen=True)
class DeviceIdentity:
    """What programs are compiled for.

    Attributes:
      platform: "cpu", "gpu", ...
      kind: of the device, as JAX reports it.
      details: by name, whatever else decides what can run there.
    """

    platform: str
    kind: str
    details: Mapping[str, str]


def local_device() -> DeviceIdentity:
    """Those of the device that is here.

    A program for an accelerator depends on the plugin that compiled it and on nothing of the host, so that it may
    have been compiled on another one.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return DeviceIdentity(device.platform, device.device_kind, plugin_versions())
    details = {
        "platform_version": device.client.platform_version,
        "machine": platform.machine(),
        "cpu_features": _cpu_features(),
    }
    return DeviceIdentity(device.platform, device.device_kind, details)


def plugin_versions() -> dict[str, str]:
    """Versions of the packages that bring JAX to NVIDIA GPUs, of those that are installed."""
    versions = {}
    for package in _PLUGINS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), ""
    )


def make_manifest(
    identity: Mapping[str, Any], sources: Mapping[str, str], device: DeviceIdentity
) -> dict[str, Any]:
    """Everything that decides what the programs are.

    Args:
      identity: by name, whatever shapes the programs (model, engine, attention); dataclasses become mappings.
      sources: digests of the files that are traced, by name, taken when they were imported.
    """
    manifest = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "device": device,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_config": {
            name: value
            for name, value in jax.config.values.items()
            if name not in _NOT_OF_PROGRAMS and not name.endswith("_dir")
        },
        "sources": sources,
        **identity,
    }
    return {name: _plain(value) for name, value in manifest.items()}


def _plain(value: Any) -> Any:
    """As JSON holds it, so that what is read back compares equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two manifests, each as a short phrase: "jaxlib 0.11.1 -> 0.11.2".

    Shapes of arrays are named only where nothing else explains them.
    """
    before, after = dict(_flatten(old)), dict(_flatten(new))
    changed = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    sources = [name[-1] for name in changed if name[0] == "sources"]
    is_another_model = sum(name[0] == "model" for name in changed) > _MOST_OF_A_MODEL
    apart = {"sources", "arrays", *(["model"] if is_another_model else [])}
    found = ["another model"] if is_another_model else []
    found += [_phrase(name, before.get(name), after.get(name)) for name in changed if name[0] not in apart]
    if sources:
        names = ", ".join(sources[:2])
        found.append(f"source of the step changed ({names}{', ...' if len(sources) > 2 else ''})")
    return found or ["shapes of parameters or state changed"] * bool(changed)


def shorten(differences: list[str]) -> str:
    """The first few of them, in one line."""
    rest = len(differences) - _MOST_DIFFERENCES
    return ", ".join(differences[:_MOST_DIFFERENCES]) + (f", and {rest} more" if rest > 0 else "")


def _flatten(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flatten(value, (*path, str(name)))
    else:
        yield path, tree


def _phrase(path: tuple[str, ...], old: Any, new: Any) -> str:
    name = ".".join(path).removeprefix("device.details.").removeprefix("jax_config.")
    values = ["none" if value in (None, "") else str(value) for value in (old, new)]
    if max(map(len, values)) > _LONGEST_VALUE:
        return f"{name} changed"
    return f"{name} {values[0]} -> {values[1]}"
