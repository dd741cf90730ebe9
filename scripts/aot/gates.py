"""What a compiled kernel or step must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.device.targets import TARGETS, Target
from scripts.aot.cases import KernelCase
from scripts.aot.dumps import Kernel
from scripts.aot.results import Result, StepFacts

# Warpgroup products and loads by the tensor memory accelerator: what Hopper kernels are written for.
_IN_MOSAIC_KERNELS = ("HGMMA", "UTMALDG")
_ADDS_UP_ONLY = (
    "combine"  # the kernel that makes one of a row's splits: it multiplies no matrices and loads no tiles
)


def failures(result: Result) -> list[str]:
    """One line for each gate that a case does not pass."""
    return [f"{result.case.name}: {what}" for what in _failures(result)]


def _failures(result: Result) -> Iterator[str]:
    case, target = result.case, TARGETS[result.case.target]
    if result.outcome == "refused":
        if not (isinstance(case, KernelCase) and case.may_refuse):
            yield f"refused: {result.detail}"
        return
    if result.outcome == "failed":
        yield result.detail
        return
    if not result.kernels:
        yield "no Pallas kernel in the program"
    for kernel in result.kernels:
        has_tiles = case.backend == "pallas-mosaic-gpu" and not kernel.name.startswith(_ADDS_UP_ONLY)
        for what in _kernel_failures(kernel, target, is_tiled_mosaic=has_tiles):
            yield f"{kernel.name}: {what}"
    if result.step is not None:
        yield from _step_failures(result.step, target)


def _kernel_failures(kernel: Kernel, target: Target, *, is_tiled_mosaic: bool) -> Iterator[str]:
    if kernel.spill_stores or kernel.spill_loads:
        yield (
            f"spills registers: {kernel.spill_stores} bytes stored, {kernel.spill_loads} bytes loaded "
            f"({kernel.registers} registers)"
        )
    if kernel.shared_memory > target.shared_memory:
        yield f"{kernel.shared_memory} bytes of shared memory, the limit is {target.shared_memory}"
    if is_tiled_mosaic:
        for instruction in _IN_MOSAIC_KERNELS:
            if not kernel.instructions.get(instruction):
                yield f"no {instruction} in its code"


def _step_failures(step: StepFacts, target: Target) -> Iterator[str]:
    for copy in step.copies:
        yield f"makes an array as large as a layer's keys: {copy[:200]}"
    if step.aliased != step.state:
        yield f"{step.aliased} bytes are aliased, the donated state has {step.state}"
    if step.temporaries >= step.layer_keys:
        yield f"{step.temporaries} bytes of temporaries, enough for a copy of a layer's keys ({step.layer_keys})"
    needed = step.arguments + step.temporaries
    if needed > target.memory:
        yield f"needs {needed} bytes, the device has {target.memory}"
    if not step.attention_calls:
        yield "launches no Pallas kernel"
