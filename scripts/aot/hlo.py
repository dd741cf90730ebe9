"""Reads the text of an optimised program: which computation runs where, and what each instruction yields."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_PALLAS_CALL = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"')

# These hand an array on, or write into the one that they were given.
_IN_PLACE = ("scatter", "dynamic-update-slice")
_NO_NEW_ARRAY = ("parameter", "get-tuple-element", "bitcast", "tuple", *_IN_PLACE)
# What their bodies do is looked at there.
_CONTAINERS = ("while", "conditional", "call")


@dataclass
class Instruction:
    """Attributes:
    shapes: of the arrays it yields. `shape` is the one, None for a tuple.
    operands: names of instructions in the same computation.
    called: names of computations.
    """

    name: str
    opcode: str
    shapes: list[tuple[int, ...]]
    is_tuple: bool
    is_root: bool
    operands: list[str]
    called: list[str]
    text: str

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.is_tuple else self.shapes[0]


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    branches: set[str] = field(default_factory=set)

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)

    def __getitem__(self, name: str) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.name == name)


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
                Instruction(
                    name=found[1],
                    opcode=found[3],
                    shapes=[_extents(array) for array in _ARRAY.findall(found[2])],
                    is_tuple=found[2].startswith("("),
                    is_root=line.lstrip().startswith("ROOT"),
                    operands=_OPERAND.findall(found[4].partition("), ")[0]),
                    called=called,
                    text=line,
                )
            )
    assert entry, "no ENTRY in the text"
    return entry, computations


def _extents(array: str) -> tuple[int, ...]:
    return tuple(int(extent) for extent in array.split(",") if extent)


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


def is_pallas_call(line: str) -> bool:
    """Whether an instruction's text launches a Pallas kernel."""
    return _PALLAS_CALL.search(line) is not None


def large_arrays_made(text: str, elements: int) -> list[str]:
    """Texts of the instructions that yield an array of `elements` or more that is not one they were given: copies,
    conversions, transpositions, fusions of them. Scatters and updates of slices write in place."""
    _, computations = parse(text)
    return [
        instruction.text.strip()
        for computation in computations.values()
        for instruction in computation.instructions
        if any(math.prod(shape) >= elements for shape in instruction.shapes)
        and not _makes_nothing(instruction, computations, elements)
    ]


def _makes_nothing(instruction: Instruction, computations: dict[str, Computation], elements: int) -> bool:
    if instruction.opcode in (*_NO_NEW_ARRAY, *_CONTAINERS):
        return True
    if instruction.opcode != "fusion":
        return False
    body = computations[instruction.called[0]]
    ends = [body[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]
    return all(
        _behind_bitcasts(end, body).opcode in _IN_PLACE
        for end in ends
        if math.prod(end.shapes[0]) >= elements
    )


def _behind_bitcasts(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction
