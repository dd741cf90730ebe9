"""The GPUs that are compiled for without having one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.paged_attention import H200, DeviceFacts

_CONFIGS = Path(__file__).with_name("gpu_targets")


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
      name: as cases and `gpu_targets/NAME.txtpb` spell it.
      device_kind: as JAX reports it of a real one (a topology calls itself otherwise); kernels are lowered for it.
      arch: as ptxas spells it.
      facts: what backends are chosen by.
      shared_memory: most bytes a thread block can have.
      memory: bytes of the device.
    """

    name: str
    device_kind: str
    arch: str
    facts: DeviceFacts
    shared_memory: int
    memory: int

    @property
    def config(self) -> str:
        """XLA's description of the device (a text proto), from public figures."""
        return (_CONFIGS / f"{self.name}.txtpb").read_text()


TARGETS = {
    target.name: target
    for target in (
        Target("h200", "NVIDIA H200", "sm_90a", H200, 232_448, 151_397_597_184),
        Target(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            "sm_80",
            DeviceFacts("gpu", (8, 0), 108),
            166_912,
            85_899_345_920,
        ),
    )
}
