"""tests/cases.md: complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_CASES = 122


def rows() -> list[tuple[str, str, str]]:
    lines = (REPOSITORY / "tests" / "cases.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| B")
    ]
    assert all(len(row) == 3 for row in cells)
    return [(row[0], row[1], row[2]) for row in cells]


def test_every_case_has_one_row():
    ids = [row[0] for row in rows()]
    assert all(re.fullmatch(r"B\d{3}", id_) for id_ in ids)
    assert ids == sorted(set(ids))
    assert len(ids) == NUM_CASES


def test_every_case_is_covered_or_waits_for_something_named():
    for id_, kind, covered in rows():
        assert kind, id_
        assert re.search(r"tests/\S+::test_\w+", covered) or re.search(r"later: \w+", covered), id_


def test_every_test_that_is_named_exists():
    defined: dict[str, set[str]] = {}
    missing = []
    for id_, _, covered in rows():
        for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", covered):
            path = REPOSITORY / file
            if file not in defined and path.exists():
                nodes = ast.walk(ast.parse(path.read_text()))
                functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
                defined[file] = {function.name for function in functions}
            if name not in defined.get(file, ()):
                missing.append(f"{id_}: {file}::{name}")
    assert not missing, "\n".join(missing)
