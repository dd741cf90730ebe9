"""A program is made again when code that it is traced from changed, and not when other code did."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.device.traced_sources import hash_sources, traced_sources
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for package in ("jaxserve", "pallas_kernels"):
        shutil.copytree(REPOSITORY / package, root / package)
    return root


def digests(root: Path) -> dict[str, str]:
    return hash_sources(traced_sources(root))


IMPORT_ALL = """
import sys
import jaxserve.device.program_definitions
from jaxserve.models.registry import get_family, supported_architectures
from pallas_kernels.paged_attention import Backend, backend_names
from pallas_kernels.paged_attention.backends import module_of
for name in supported_architectures():
    get_family(name)
for name in backend_names():
    if not name.endswith("-interpret"):
        module_of(Backend(name))
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("jaxserve", "pallas_kernels"):
        print(module.__file__)
"""


def test_whatever_python_imports_to_trace_is_counted() -> None:
    """Python is asked instead of the files' texts. Only packages that bring nothing but their name may be missing."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    imported = {Path(line) for line in done.stdout.splitlines()}
    counted = set(traced_sources().values())
    missed = imported - counted
    assert len(imported) > 25
    assert {file.name for file in missed} <= {"__init__.py"}, missed
    assert REPOSITORY / "pallas_kernels/paged_attention/tuning_table.json" in counted


@pytest.mark.parametrize(
    "name",
    [
        "jaxserve/device/program_definitions.py",
        "jaxserve/device/step.py",
        "jaxserve/device/sampling.py",
        "jaxserve/models/rope.py",
        "jaxserve/batch/layout.py",
        "jaxserve/batch/bucket.py",
        "pallas_kernels/paged_attention/xla.py",
        "pallas_kernels/paged_attention/pallas_triton_kernels.py",
        "pallas_kernels/paged_attention/tuning_table.json",
    ],
)
def test_a_change_of_what_is_traced_shows_in_its_own_line_alone(copied: Path, name: str) -> None:
    before, file = digests(copied), copied / name
    text = file.read_text()
    file.write_text(text + "\n")
    after = digests(copied)
    file.write_text(text)
    assert [key for key in before if before[key] != after[key]] == [name]
    assert digests(copied) == before


def test_scheduler_planner_and_server_may_change(copied: Path) -> None:
    before = digests(copied)
    others = [
        *(copied / "jaxserve").glob("*.py"),
        *(copied / "jaxserve/scheduler").glob("*.py"),
        *(copied / "jaxserve/batch").glob("*.py"),
        *(copied / "jaxserve/server").glob("*.py"),
    ]
    changed = {str(file.relative_to(copied)) for file in others} - set(before)
    for name in changed:
        (copied / name).write_text("changed = True")
    after = digests(copied)
    assert after == before
    for name in ("scheduler/scheduler.py", "batch/buckets.py", "batch/bucket_plan.py", "engine.py"):
        assert f"jaxserve/{name}" in changed


ENTRY = "jaxserve/device/program_definitions.py"
EDGES = {
    "import a.module": ("import jaxserve.extra", True),
    "from a import module": ("from jaxserve import extra", True),
    "from a.module import name": ("from jaxserve.extra import a, b", True),
    "a relative one": ("from .. import extra", True),
    "a relative one by name": ("from ..extra import a", True),
    "in a function": ("def f():\n    if True:\n        from jaxserve import extra", True),
    "in a try": ("try:\n    pass\nexcept ValueError:\n    import jaxserve.extra", True),
    "by name": ("MODULES = {'a': 'jaxserve.extra'}", True),
    "where types are not checked": (
        "if TYPE_CHECKING:\n    pass\nelse:\n    import jaxserve.extra",
        True,
    ),
    "for types alone": ("if TYPE_CHECKING:\n    import jaxserve.extra", False),
    "in a comment": ("# import jaxserve.extra", False),
    "something that is not there": ("from jaxserve import missing", False),
    "not ours": ("import numpy", False),
}


@pytest.mark.parametrize(("line", "counts"), EDGES.values(), ids=EDGES.keys())
def test_how_a_file_can_be_imported(tmp_path: Path, line: str, counts: bool) -> None:
    """The new file counts, and so does what it imports in turn."""
    (tmp_path / "jaxserve/device").mkdir(parents=True)
    (tmp_path / ENTRY).write_text(line)
    (tmp_path / "jaxserve/extra.py").write_text("from jaxserve.more import x")
    (tmp_path / "jaxserve/more.py").write_text("import jaxserve.extra")  # a circle
    expected = ["jaxserve/extra.py", "jaxserve/more.py"] if counts else []
    assert [name for name in traced_sources(tmp_path) if name != ENTRY] == expected


def test_packages_and_their_tables_count(tmp_path: Path) -> None:
    (tmp_path / "jaxserve/device").mkdir(parents=True)
    (tmp_path / "jaxserve/parts").mkdir()
    (tmp_path / ENTRY).write_text("from jaxserve.parts import name")
    (tmp_path / "jaxserve/parts/__init__.py").write_text("from jaxserve.parts.inner import name")
    (tmp_path / "jaxserve/parts/inner.py").write_text("name = 1")
    (tmp_path / "jaxserve/parts/table.json").write_text("{}")
    (tmp_path / "jaxserve/parts/notes.txt").write_text("")
    assert [name for name in traced_sources(tmp_path) if name != ENTRY] == [
        "jaxserve/parts/__init__.py",
        "jaxserve/parts/inner.py",
        "jaxserve/parts/table.json",
    ]


def test_where_the_packages_lie_does_not_matter(copied: Path) -> None:
    shutil.copytree(copied / "pallas_kernels", copied / "elsewhere/pallas_kernels")
    shutil.copytree(copied / "jaxserve", copied / "elsewhere/jaxserve")
    assert digests(copied / "elsewhere") == digests(copied)
