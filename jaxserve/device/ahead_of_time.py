"""Compiling an engine's programs into a folder, without running or even loading any: for this device or another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from jaxserve.device.compile_threads import in_threads
from jaxserve.device.executable_cache import ExecutableCache
from jaxserve.device.program_definitions import Definition, Programs
from jaxserve.device.programs import ProgramKey, definitions_for
from jaxserve.errors import ConfigError
from jaxserve.progress import Progress


def definitions_of(programs: Programs, keys: Iterable[ProgramKey]) -> list[Definition]:
    """All programs behind these keys, each once."""
    found: dict[str, Definition] = {}
    for key in keys:
        for definition in definitions_for(programs, key).values():
            found.setdefault(definition.name, definition)
    return list(found.values())


def compile_missing(
    definitions: list[Definition],
    cache: ExecutableCache,
    lowering: Callable[[], AbstractContextManager[None]],
    *,
    threads: int,
    progress: Progress,
) -> int:
    """Compile whatever the cache lacks, `threads` at a time, and keep it there.

    Args:
      lowering: what each program is traced and lowered inside of.

    Returns:
      How many had to be compiled.

    Raises:
      ConfigError: a program could not be kept; the log says why.
    """
    missing = [definition for definition in definitions if not cache.has(definition.name)]

    def make(definition: Definition) -> None:
        with lowering():
            program = definition.compile()
        cache.store(definition.name, program)
        if not cache.has(definition.name):
            raise ConfigError(f"{definition.name} could not be kept in {cache.directory}")

    if not missing:
        return 0
    for _ in in_threads(make, missing, threads=threads, progress=progress, what="Compiling"):
        pass
    return len(missing)
