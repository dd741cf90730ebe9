"""What an attention call is about, and what it runs on: the facts that a backend is chosen by."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class AttentionSpec:
    """The static side of an attention call.

    Attributes:
      num_heads, num_kv_heads: H and K; H is a multiple of K.
      head_dim: d.
      block_size: b, tokens a block of the cache holds.
      dtype: of queries and results.
      kv_dtype: of the cache; differs from `dtype` where the cache is quantised.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype != self.dtype


@dataclass(frozen=True)
class DeviceFacts:
    """What a backend is chosen by.

    Attributes:
      platform: "cpu", "gpu", ...
      compute_capability: (major, minor) of an NVIDIA GPU; None for another.
      num_sms: its streaming multiprocessors.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None


H200 = DeviceFacts("gpu", (9, 0), 132)


def facts_of(device: jax.Device) -> DeviceFacts:
    """The facts of a device that is there."""
    if device.platform != "gpu":
        return DeviceFacts(device.platform)
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(device.compute_capability))
    if capability is None:  # AMD's are called gfx942 and the like
        return DeviceFacts("gpu")
    return DeviceFacts("gpu", (int(capability[1]), int(capability[2])), int(device.core_count))
