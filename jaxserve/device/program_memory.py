"""What compiled programs need while they run, as XLA says (loaded ones as well as freshly compiled ones)."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxserve.device.step_parts import StepParts


def temporary_bytes(program: Any) -> int:
    """The most that a program of `ProgramMaker` needs at once, beside its arguments: results, and what it forgets.

    What it returns in the place of an argument costs nothing.
    """
    if not (isinstance(program, partial) and isinstance(program.args[0], StepParts)):
        return _own(program)
    parts: StepParts = program.args[0]
    begin: Any = parts.begin
    # The hidden states and the batch live from the first part to the last.
    between: int = begin.memory_analysis().output_size_in_bytes
    return max(_own(begin), between + max(map(_own, (*set(parts.layers), parts.end))))


def _own(program: Any) -> int:
    sizes = program.memory_analysis()
    new: int = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    temporaries: int = sizes.temp_size_in_bytes
    return temporaries + new
