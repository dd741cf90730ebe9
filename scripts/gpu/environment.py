"""What the figures depend on besides the code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import jax

from pallas_kernels.paged_attention import AttentionSpec, backend_names, facts_of, resolve_backend
from scripts.gpu.jobs import Case
from scripts.gpu.supervisor import REPOSITORY
from scripts.gpu.workplace import Workplace

_VERSIONS = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "torch",
    "flax",
    "numpy",
)
_EIGHT_B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


def describe(case: Case, place: Workplace) -> dict[str, Any]:
    """Date, device, driver, versions, and which backend each name means for Llama-3.1-8B's attention."""
    device = jax.local_devices()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"),
        "device": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        "backends": {name: _resolved(name, device) for name in ("auto", *backend_names())},
        "torch": importlib.util.find_spec("torch") is not None,
    }


def _resolved(name: str, device: jax.Device) -> str:
    spec = AttentionSpec(**_EIGHT_B, dtype="bfloat16", kv_dtype="bfloat16")
    try:
        backend = resolve_backend(name, spec=spec, device=facts_of(device))
    except (NotImplementedError, ValueError) as error:
        return f"refused: {error}"
    return f"{backend.name}, {backend.tuning}" if backend.tuning else backend.name


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
