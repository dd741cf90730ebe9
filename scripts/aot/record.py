"""docs/results/aot-check.json: the latest result of every case. A run adds to it, so that after a change of one kernel
only that kernel's cases need to be compiled again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from scripts.aot.cases import all_cases
from scripts.aot.results import Result


def read(path: Path) -> list[Result]:
    """A result for every case, in their order; those that were never compiled are "not run"."""
    known = {}
    if path.exists():
        found = map(Result.from_json, json.loads(path.read_text()))
        known = {result.case.name: result for result in found}
    return [
        replace(known[case.name], case=case) if case.name in known else Result(case, "not run")
        for case in all_cases()
    ]


def add(path: Path, new: Iterable[Result]) -> list[Result]:
    """Replace the results of some cases; what `read` gives now. Results of cases that are no more are dropped."""
    by_name = {result.case.name: result for result in new}
    results = [by_name.get(result.case.name, result) for result in read(path)]
    lines = ",\n".join(json.dumps(result.as_json()) for result in results if result.outcome != "not run")
    path.write_text(f"[\n{lines}\n]\n")
    return results
