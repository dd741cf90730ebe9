"""Which files decide what a step's programs do: what `program_definitions` imports, directly or not.

Read from the files themselves, so that no list has to be kept: what is not imported by the code that traces (the
scheduler, the planner of shapes, the server) can change without anything being compiled again.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("jaxserve", "pallas_kernels")
_FIRST = "jaxserve.device.program_definitions"


def traced_sources(root: Path | None = None) -> dict[str, Path]:
    """Files by name, in order: modules, and the JSON tables beside them, which code reads.

    Packages' own files count where names are taken from them. Imports inside functions count; those for type checkers
    alone do not.

    Args:
      root: the folder that holds the packages; where this one was imported from by default.
    """
    root = root or Path(__file__).parents[2]
    modules: dict[str, Path] = {}
    waiting = [_FIRST]
    while waiting:
        name = waiting.pop()
        file = _file_of(root, name)
        if file is not None and name not in modules:
            modules[name] = file
            waiting += _imports(name, file)
    folders = sorted({file.parent for file in modules.values()})
    tables = [table for folder in folders for table in folder.glob("*.json")]
    return {str(file.relative_to(root)): file for file in sorted([*modules.values(), *tables])}


def hash_sources(sources: dict[str, Path]) -> dict[str, str]:
    """A digest of each file's content."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:32] for name, file in sources.items()}


def _file_of(root: Path, module: str) -> Path | None:
    """None for what is no module of ours."""
    parts = module.split(".")
    if parts[0] not in _PACKAGES or not all(part.isidentifier() for part in parts):
        return None
    path = root.joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imports(module: str, file: Path) -> Iterator[str]:
    """Names of all modules that a file may import; some are none, but names inside one."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(file.read_bytes(), str(file))
    for statement in _statements(tree.body):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = package[: len(package) - statement.level + 1] if statement.level else []
            source = ".".join([*base, *filter(None, [statement.module])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in statement.names)
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            # Tables of modules that are imported by name: attention backends.
            strings = (node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
            yield from (value for value in strings if isinstance(value, str))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """These and all inside them that run; expressions are not looked into, since no import hides there."""
    for statement in body:
        yield statement
        if not _is_for_type_checkers(statement):
            yield from _statements(getattr(statement, "body", []))
        yield from _statements(getattr(statement, "orelse", []))
        yield from _statements(getattr(statement, "finalbody", []))
        for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _statements(branch.body)


def _is_for_type_checkers(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")
