"""The results as Markdown, and where they stand in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from jaxserve.device.targets import TARGETS
from scripts.aot.cases import HEADS, KernelCase, StepCase
from scripts.aot.results import Result
from scripts.aot.targets_table import targets_table

_SHOWN = ("HGMMA", "HMMA", "IMMA", "UTMALDG", "LDGSTS", "LDG", "MUFU", "BAR")


def replace_between(text: str, name: str, new: str) -> str:
    """`text` with what stands between `<!-- NAME:begin ... -->` and `<!-- NAME:end -->` replaced.

    Raises:
      ValueError: the markers are not there, in this order.
    """
    begin = text.find(f"<!-- {name}:begin")
    start = text.find("-->", begin) + len("-->")
    end = text.find(f"<!-- {name}:end -->", start)
    if min(begin, end) < 0:
        raise ValueError(f"no markers {name}:begin and {name}:end")
    return f"{text[:start]}\n{new.strip()}\n{text[end:]}"


def kernel_tables(results: Iterable[Result]) -> str:
    """A table for each target and backend."""
    kernels = [result for result in results if isinstance(result.case, KernelCase)]
    parts = []
    for (target, backend), group in groupby(kernels, key=lambda r: (r.case.target, r.case.backend)):
        device = TARGETS[target]
        lines = [
            f"`{backend}` on {device.device_kind} ({device.arch}, up to {device.shared_memory:,} B of shared memory):",
            "",
            "| shape | H/K/d | b | dtype, cache | kernel | registers | spills (B) | stack (B) | shared (B) | SASS |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(row for result in group for row in _kernel_rows(result)),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def row_start(case: KernelCase | StepCase) -> str:
    """The first cells of a case's rows: what was compiled."""
    if isinstance(case, StepCase):
        return f"| {case.model} | {case.backend} | {case.tokens:,} tokens, {case.seqs} sequences |"
    heads = HEADS[case.model]
    calls = [
        name
        for name, is_so in (("decode only", case.function == "decode"), ("window, soft-cap", case.windowed))
        if is_so
    ]
    call = f" ({', '.join(calls)})" if calls else ""
    return (
        f"| {case.model}{call} | {heads.num_heads}/{heads.num_kv_heads}/{heads.head_dim} | {case.block_size} "
        f"| {case.dtype}, {case.kv_dtype} |"
    )


def _kernel_rows(result: Result) -> list[str]:
    start = row_start(result.case)
    if result.outcome != "compiled":
        return [f"{start} {_why_not(result)} | | | | | |"]
    return [
        f"{start} {kernel.name} | {kernel.registers} | {kernel.spill_stores}/{kernel.spill_loads} "
        f"| {kernel.stack} | {kernel.shared_memory:,} | {_mix(kernel.instructions)} |"
        for kernel in result.kernels
    ]


def step_table(results: Iterable[Result]) -> str:
    """One row for each compiled step."""
    lines = [
        "| model | backend | bucket | lower + compile (s) | arguments (GB) | cache (GB) | aliased (GB) | "
        "temporaries (MB) | cache copies | kernel launches |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case, step = result.case, result.step
        if isinstance(case, KernelCase):
            continue
        start = row_start(case)
        if step is None:
            lines.append(f"{start} {_why_not(result)} | | | | | | |")
            continue
        lines.append(
            f"{start} {result.lower_seconds:.1f} + {result.compile_seconds:.1f} | {step.arguments / 1e9:.2f} "
            f"| {step.caches / 1e9:.2f} | {step.aliased / 1e9:.2f} | {step.temporaries / 1e6:.1f} "
            f"| {len(step.copies)} | {step.attention_calls} |"
        )
    return "\n".join(lines)


def _mix(instructions: dict[str, int]) -> str:
    return ", ".join(f"{name} {instructions[name]}" for name in _SHOWN if instructions.get(name))


def _why_not(result: Result) -> str:
    detail = result.detail.replace("|", "\\|").replace("\n", " ")
    return f"{result.outcome}: {detail}" if detail else result.outcome


def write_tables(document: str, results: list[Result]) -> str:
    """docs/kernels.md with every table made anew."""
    document = replace_between(document, "aot_check targets", targets_table())
    document = replace_between(document, "aot_check kernels", kernel_tables(results))
    return replace_between(document, "aot_check steps", step_table(results))


def progress_line(result: Result) -> str:
    """One line on a case for somebody who waits."""
    if result.outcome != "compiled":
        return f"{result.case.name}: {result.outcome}: {result.detail}"
    kernels = "; ".join(
        f"{kernel.name} {kernel.registers} registers, {kernel.spill_stores + kernel.spill_loads} B spilled, "
        f"{kernel.shared_memory} B shared"
        for kernel in result.kernels
    )
    step = result.step
    memory = (
        f" arguments {step.arguments} B, temporaries {step.temporaries} B, aliased {step.aliased} of {step.state} B, "
        f"{len(step.copies)} copies;"
        if step
        else ""
    )
    seconds = f"{result.lower_seconds:.1f} + {result.compile_seconds:.1f} s"
    return f"{result.case.name}: {seconds};{memory} {kernels}"
