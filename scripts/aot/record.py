"""docs/results/aot-check.json: the latest result of every case. A run adds to it, so that after a change of one kernel
only that kernel's cases need to be compiled again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from scripts.aot.cases import all_cases
from scripts.aot.results import Result


def read(path: Path) -> list[Result]:
    """A result for every case, in their order; those that were never compiled are "not run"."""
    known = {}
    if path.exists():
        known = {result.case: result for result in map(Result.from_json, json.loads(path.read_text()))}
    return [known.get(case, Result(case, "not run")) for case in all_cases()]


def add(path: Path, new: Iterable[Result]) -> list[Result]:
    """Replace the results of some cases; what `read` gives now. Results of cases that are no more are dropped."""
    by_case = {result.case: result for result in new}
    results = [by_case.get(result.case, result) for result in read(path)]
    lines = ",\n".join(json.dumps(result.as_json()) for result in results if result.outcome != "not run")
    path.write_text(f"[\n{lines}\n]\n")
    return results
