"""scripts/bench grammars, on schemas of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def case(schema: object, *tests: tuple[object, bool]) -> str:
    return json.dumps({"schema": schema, "tests": [{"data": data, "valid": valid} for data, valid in tests]})


def test_it_counts_what_is_taken_and_what_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(case(SCHEMA, ({"a": 1}, True), ({"a": "x"}, False), ({}, False)))
    (tmp_path / "b.json").write_text(case({"not": {}}, (1, False)))
    result = tmp_path / "out" / "result.json"
    result.parent.mkdir()
    assert main(["grammars", str(tmp_path), "--json", str(result)]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 schemas are taken" in said
    assert "invalid instances accepted: 0 of 2" in said
    figures = json.loads(result.read_text())
    assert figures["instances"] == {"invalid, refused": 2, "valid, accepted": 1}
    # What is called invalid and is not, is noticed.
    (tmp_path / "c.json").write_text(case(SCHEMA, ({"a": 2}, False)))
    assert main(["grammars", str(tmp_path)]) == 1


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammars", str(tmp_path)]) == 2
    (tmp_path / "a.json").write_text("[]")
    assert main(["grammars", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
