"""Finds the Pallas kernels in what XLA and Mosaic dump while they compile."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.aot.cuda_tools import inspect_ptx

MOSAIC_FOLDER = "mosaic"

_TRITON_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?\bname = "([^"]+)"')
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_SCRATCH = re.compile(r"smem_scratch_bytes=(\d+)")
_BARRIERS = re.compile(r"num_barriers=(\d+),[^()]*\): (\d+)")
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      registers: of a thread. stack, spill_stores, spill_loads: bytes of a thread.
      shared_memory: bytes of a thread block, static and dynamic.
      instructions: SASS mnemonic -> how often it stands in the code.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    instructions: dict[str, int]


def environment(folder: Path) -> dict[str, str]:
    """What must stand in the environment before jax is imported, so that dumps are written to `folder`."""
    mosaic = folder / MOSAIC_FOLDER
    mosaic.mkdir(parents=True, exist_ok=True)
    return {
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx --xla_dump_hlo_as_text",
        "MOSAIC_GPU_DUMP_TO": str(mosaic),
    }


def find_kernels(folder: Path, optimised_hlo: str, arch: str) -> list[Kernel]:
    """Every Pallas kernel of the one program that was dumped to `folder`; XLA's own kernels are left out."""
    found = [*_triton_kernels(folder, optimised_hlo, arch), *_mosaic_kernels(folder / MOSAIC_FOLDER, arch)]
    return sorted(found, key=lambda kernel: kernel.name)


def triton_names(optimised_hlo: str) -> set[str]:
    """Names of the Pallas Triton kernels that a program calls."""
    return set(_TRITON_CALL.findall(optimised_hlo))


def dynamic_shared_memory(thunks: str, kernel: str) -> int:
    """Bytes that XLA's launch of a kernel asks for, from its listing of what it launches.

    Raises:
      ValueError: it does not launch a kernel of that name.
    """
    launch = re.search(rf" {re.escape(kernel)} grid: .*shared_memory: (\d+)", thunks)
    if launch is None:
        raise ValueError(f"no launch of {kernel}")
    return int(launch[1])


def mosaic_shared_memory(resources: str) -> int:
    """Bytes that a Mosaic kernel asks for, from its `resources` dump: buffers, and 8 bytes a barrier."""
    scratch = _SCRATCH.search(resources)
    if scratch is None:
        raise ValueError(f"not a dump of resources: {resources[:200]}")
    barriers = sum(int(number) * int(times) for number, times in _BARRIERS.findall(resources))
    return int(scratch[1]) + _BARRIER_BYTES * barriers


def _triton_kernels(folder: Path, optimised_hlo: str, arch: str) -> list[Kernel]:
    wanted = triton_names(optimised_hlo)
    thunks = "\n".join(path.read_text() for path in sorted(folder.glob("*.thunk_sequence.txt")))
    kernels = []
    for ptx in sorted(folder.glob("*.ptx")):
        for name in wanted.intersection(_ENTRY.findall(ptx.read_text())):
            wanted.discard(name)
            kernels += _look_at(ptx, arch, dynamic_shared_memory(thunks, name), only=name)
    if wanted:
        raise ValueError(f"no PTX was dumped for {', '.join(sorted(wanted))}")
    return kernels


def _mosaic_kernels(folder: Path, arch: str) -> list[Kernel]:
    """Dumps are named after the kernel's function, and numbered: the number stays where functions share a name."""
    dumped = sorted(folder.glob("*.ptx"))
    functions = Counter(ptx.stem.rpartition("_")[0] for ptx in dumped)
    kernels = []
    for ptx in dumped:
        function = ptx.stem.rpartition("_")[0]
        shared = mosaic_shared_memory(ptx.with_suffix(".resources.txt").read_text())
        [kernel] = _look_at(ptx, arch, shared)
        kernels.append(replace(kernel, name=function if functions[function] == 1 else ptx.stem))
    return kernels


def _look_at(ptx: Path, arch: str, dynamic_shared: int, only: str | None = None) -> list[Kernel]:
    resources, instructions = inspect_ptx(ptx, arch)
    return [
        Kernel(
            name=found.name,
            registers=found.registers,
            stack=found.stack,
            spill_stores=found.spill_stores,
            spill_loads=found.spill_loads,
            shared_memory=found.static_shared + dynamic_shared,
            instructions=dict(instructions),
        )
        for found in resources
        if only in (None, found.name)
    ]
