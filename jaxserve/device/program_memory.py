"""What compiled programs need while they run, as XLA says (loaded ones as well as freshly compiled ones)."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxserve.device.draft import DraftParts, ForwardParts
from jaxserve.device.step_parts import StepParts


def temporary_bytes(program: Any) -> int:
    """The most that a program of `ProgramMaker` needs at once, beside its arguments: results, and what it forgets.

    What it returns in the place of an argument costs nothing.
    """
    if not isinstance(program, partial):
        return _own(program)
    if isinstance(program.args[0], ForwardParts):
        forward = program.args[0]
        rest = [forward.next] if isinstance(forward, DraftParts) else []
        every = [*set(forward.layers), *rest]
        return max(_own(forward.begin), _results(forward.begin) + max(map(_own, every)))
    parts: StepParts = program.args[0]
    # What `begin` and `select` give lives until the end; so does, on its way to the host, what is sampled.
    begun, selected = _results(parts.begin), _results(parts.select)
    last = max(_own(parts.sample), _results(parts.sample) + _own(parts.score))
    layers = max(map(_own, set(parts.layers)))
    return max(_own(parts.begin), begun + max(layers, _own(parts.select), selected + last))


def _results(program: Any) -> int:
    """Those that are not in the place of an argument."""
    sizes = program.memory_analysis()
    new: int = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return new


def _own(program: Any) -> int:
    temporaries: int = program.memory_analysis().temp_size_in_bytes
    return temporaries + _results(program)
