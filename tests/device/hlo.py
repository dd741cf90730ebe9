"""Reads the text of an optimised program: which computation runs where, and what each instruction yields."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")


@dataclass
class Instruction:
    """`shape` is the result's, None for a tuple."""

    opcode: str
    shape: tuple[int, ...] | None
    is_root: bool
    called: list[str]
    text: str


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    branches: set[str] = field(default_factory=set)

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)


def parse(text: str) -> tuple[str, dict[str, Computation]]:
    """(name of the entry, computations by name)."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation(header[2])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            called = _CALLS.findall(line)
            current.calls.update(called)
            for several, single in _BRANCHES.findall(line):
                current.branches.update(name.strip().lstrip("%") for name in (several or single).split(","))
            current.instructions.append(
                Instruction(found[2], _shape(found[1]), line.lstrip().startswith("ROOT"), called, line)
            )
    assert entry, "no ENTRY in the text"
    return entry, computations


def _shape(result: str) -> tuple[int, ...] | None:
    if result.startswith("("):
        return None
    dimensions = result[result.index("[") + 1 : result.index("]")]
    return tuple(int(extent) for extent in dimensions.split(",") if extent)


def always_run(entry: str, computations: dict[str, Computation]) -> set[str]:
    """Computations that run whenever the program does: reachable without entering a branch."""
    reached: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += computations[name].calls
    return reached


def aliased_outputs(text: str) -> dict[int, int]:
    """Output number -> number of the input whose memory it takes over."""
    header = text.split("\n", 1)[0]
    return {
        int(out): int(into)
        for out, into in re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    }
