"""Who may import whom, and what an import may not set off."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# A room is a folder of jaxserve/, or a file beside them. It may import the rooms named here, and itself. A new file
# or folder needs a line: that is the moment to think about where it belongs.
PLAIN_DATA = {
    "errors",
    "config",
    "grammar",
    "request",
    "outputs",
    "stats",
    "distribution",
    "request_stats",
    "engine_view",
    "progress",
    "model_store",
    "file_lock",
    "line_writer",
    "server_url",
    "plain_numbers",
}
TEXT = {"tokenizer", "chat_template", "detokenizer", "stop_strings"}
ENGINE = (
    PLAIN_DATA
    | TEXT
    | {
        "scheduler",
        "batch",
        "models",
        "checkpoint",
        "device",
        "speculative",
        "structured_output",
        "output_processor",
        "pooling",
        "host_gap",
        "lost_steps",
        "goodput",
        "latency_meter",
        "recent_times",
    }
)
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors", "request"},
    "grammar": {"errors"},
    "request": {"errors", "grammar"},
    "outputs": {"request"},
    "stats": {"request", "request_stats"},
    "distribution": set(),
    "request_stats": {"distribution"},
    "engine_view": set(),
    "recent_times": {"engine_view"},
    "host_gap": set(),
    "lost_steps": {"outputs", "request"},
    "goodput": {"request", "stats"},
    "latency_meter": {"goodput", "outputs", "recent_times", "request", "stats"},
    "plain_numbers": set(),
    "progress": set(),
    "model_store": set(),
    "file_lock": set(),
    "line_writer": {"errors"},
    "server_url": {"errors"},
    "workload": PLAIN_DATA,
    **dict.fromkeys(TEXT, PLAIN_DATA | TEXT),
    "scheduler": PLAIN_DATA,
    "batch": PLAIN_DATA | {"scheduler"},
    "models": PLAIN_DATA,
    "pooling": {"outputs", "request"},
    "output_processor": PLAIN_DATA | TEXT | {"pooling"},
    "checkpoint": PLAIN_DATA | TEXT | {"models"},
    "speculative": PLAIN_DATA | {"scheduler", "batch"},
    "structured_output": PLAIN_DATA | TEXT | {"batch"},
    "device": PLAIN_DATA | {"scheduler", "batch", "models", "speculative", "pooling"},
    "engine": ENGINE,
    "engine_setup": ENGINE,
    "engine_factory": ENGINE | {"engine", "engine_setup", "recording"},
    "compile_programs": ENGINE | {"engine_setup"},
    "prompt": {"errors", "tokenizer"},
    "completion": {"outputs", "prompt", "request"},
    "llm": ENGINE | {"engine", "engine_factory", "prompt", "completion"},
    "recording": ENGINE | {"engine", "workload"},
    "replay": ENGINE | {"engine", "engine_factory", "workload", "recording", "simulation"},
    "simulation": ENGINE | {"engine", "workload", "recording"},
    "bench": ENGINE | {"engine", "engine_factory", "engine_setup", "workload", "recording", "simulation"},
    "tool_calls": PLAIN_DATA,
    "server": ENGINE | {"engine", "engine_factory", "tool_calls"},
    "batch_runner": ENGINE | {"engine", "engine_factory", "server"},
    "batch_jobs": ENGINE | {"engine", "server", "batch_runner"},
    "cli": ENGINE
    | {
        "engine",
        "engine_factory",
        "llm",
        "server",
        "batch_runner",
        "batch_jobs",
        "compile_programs",
        "workload",
        "recording",
        "simulation",
        "replay",
        "bench",
        "__init__",
    },
    "__main__": {"cli"},
    "__init__": {"config", "grammar", "request", "llm", "completion"},
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of what a file imports anywhere, inside functions and under TYPE_CHECKING as well."""
    package = path.relative_to(REPOSITORY).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    """`jaxserve.scheduler.policy.Fifo` -> `scheduler`; a name of the package itself -> `__init__`."""
    parts = module.split(".")
    source = REPOSITORY / "jaxserve"
    if len(parts) == 1 or not ((source / parts[1]).is_dir() or (source / f"{parts[1]}.py").is_file()):
        return "__init__"
    return parts[1]


@pytest.mark.parametrize("path", python_files("jaxserve"), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_room_imports_one_above_it(path: Path) -> None:
    room = room_of(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    assert room in MAY_IMPORT, f"{room}: say in MAY_IMPORT of {__file__} what it may import"
    for module in imported_modules(path):
        if module.split(".")[0] == "jaxserve":
            target = room_of(module)
            assert target == room or target in MAY_IMPORT[room], f"{path.name} ({room}) imports {module}"


def test_kernels_know_nothing_of_the_engine() -> None:
    for path in python_files("pallas_kernels"):
        assert not [name for name in imported_modules(path) if name.split(".")[0] == "jaxserve"], path


def test_nothing_needs_torch() -> None:
    for path in python_files("jaxserve", "pallas_kernels", "tests"):
        assert not [name for name in imported_modules(path) if name.split(".")[0] == "torch"], path


def modules_of(*rooms: str) -> list[str]:
    paths = [path for room in rooms for path in (REPOSITORY / "jaxserve").glob(f"{room}.py")]
    paths += python_files(*(f"jaxserve/{room}" for room in rooms))
    return [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]


HEAVY = ("jax", "jaxlib", "flax", "orbax", "transformers", "torch", "aiohttp")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        pytest.param(["jaxserve"], HEAVY, id="the package"),
        pytest.param(modules_of(*sorted(PLAIN_DATA)), HEAVY, id="plain data"),
        pytest.param(modules_of("scheduler"), (*HEAVY, "numpy"), id="scheduler"),
        pytest.param(modules_of("batch"), HEAVY, id="batch"),
        pytest.param(modules_of("tool_calls"), (*HEAVY, "numpy"), id="tool calls"),
        pytest.param(modules_of("workload"), (*HEAVY, "numpy"), id="workload"),
        pytest.param(modules_of("cli"), HEAVY, id="command line"),
    ],
)
def test_importing_starts_no_device_and_loads_nothing_heavy(
    modules: list[str], unwanted: tuple[str, ...]
) -> None:
    """In a fresh process, because this one has imported everything by now."""
    assert modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {unwanted!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    script = "import jaxserve\nfor name in jaxserve.__all__: getattr(jaxserve, name)"
    result = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# Everything else is pure, or plain Python. Loading weights puts them in place itself, so that no second copy is held.
AT_THE_DEVICE_BOUNDARY = {
    "device/model_runner.py",
    "device/params.py",
    "device/block_swap.py",
    "device/program_definitions.py",
    "checkpoint/weights.py",
    "bench/step_programs.py",
    "bench/machine_rates.py",
}
BOUNDARY_CALLS = {"jit", "device_put", "device_get", "block_until_ready", "copy_to_host_async"}


def test_only_the_boundary_compiles_and_moves_data() -> None:
    source = REPOSITORY / "jaxserve"
    for path in python_files("jaxserve"):
        if str(path.relative_to(source)) not in AT_THE_DEVICE_BOUNDARY:
            names = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert not names & BOUNDARY_CALLS, path
