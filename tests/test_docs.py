"""What the documents name exists: files, links, and flags with their defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from jaxserve.cli.serve import serve

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("workloads/*.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve()
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def drawn_files() -> set[str]:
    """Paths in the tree of docs/architecture.md, told by indentation."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    tree = text[text.index("## The house") :].split("```")[1]
    folders: list[str] = []
    files = set()
    for line in tree.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        first, *more = line.split()
        if first.endswith("/"):
            folders = [*folders[:depth], first]
        else:
            names = [first, *(name for name in more if re.fullmatch(r"\w+\.py", name))]
            files |= {"".join(folders[:depth]) + name for name in names if depth}
    return files


def test_the_house_is_drawn_as_it_stands() -> None:
    built = {
        str(path.relative_to(REPOSITORY))
        for folder in ("jaxserve", "pallas_kernels")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    drawn = {path for path in drawn_files() if not path.endswith(("__init__.py", "__main__.py"))}
    assert drawn == built


def test_paths_in_prose_exist() -> None:
    """`folder/file.py` in a document is a path from the root, from jaxserve/ or from beside its neighbour."""
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|json|jsonl|svg))`", document.read_text()):
            places = (REPOSITORY, REPOSITORY / "jaxserve", document.parent)
            assert any((place / path).exists() for place in places), f"{document.name} names {path}"


def test_the_table_of_flags_is_that_of_serve() -> None:
    table = [
        line for line in (REPOSITORY / "docs/serving.md").read_text().splitlines() if line.startswith("| `--")
    ]
    named = {flag for line in table for flag in re.findall(r"`--([a-z-]+)`", line.split("|")[1])}
    real = {name.replace("_", "-") for name in inspect.signature(serve).parameters}
    assert {flag.removeprefix("no-") for flag in named} == real
