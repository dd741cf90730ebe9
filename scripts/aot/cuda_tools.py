"""What NVIDIA's tools say about a kernel: ptxas compiles its PTX and counts, cuobjdump lists its instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '[^']+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
# The address is in a comment of its own; a predicate may stand before the instruction.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+ )?([A-Z][A-Z0-9_]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one entry function; all but `registers` in bytes."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


def parse_ptxas(text: str) -> list[Resources]:
    """Every entry function in the output of `ptxas -v`."""
    found = []
    for match in _FUNCTION.finditer(text):
        shared = _STATIC_SHARED.search(match["rest"])
        found.append(
            Resources(
                name=match["name"],
                registers=int(match["registers"]),
                stack=int(match["stack"]),
                spill_stores=int(match["stores"]),
                spill_loads=int(match["loads"]),
                static_shared=int(shared[1]) if shared else 0,
            )
        )
    return found


def count_instructions(sass: str) -> Counter[str]:
    """How often each instruction stands in the output of `cuobjdump -sass`, without its modifiers."""
    return Counter(_INSTRUCTION.findall(sass))


def inspect_ptx(ptx: Path, arch: str) -> tuple[list[Resources], Counter[str]]:
    """Compile a PTX file and look at the result. The tools are found on the PATH.

    Raises:
      RuntimeError: ptxas refuses, or reports nothing that is understood here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        cubin = str(Path(scratch) / "kernel.cubin")
        done = subprocess.run(
            ["ptxas", "-v", f"-arch={arch}", str(ptx), "-o", cubin], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"ptxas: {done.stderr.strip()}")
        resources = parse_ptxas(done.stderr)
        sass = subprocess.run(
            ["cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
    instructions = count_instructions(sass)
    if not resources or not instructions:
        raise RuntimeError(
            f"nothing understood of what ptxas and cuobjdump print:\n{done.stderr}{sass[:500]}"
        )
    return resources, instructions
