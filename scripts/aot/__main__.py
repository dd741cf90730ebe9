"""The command line of scripts/aot_check."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from scripts.aot import record
from scripts.aot.cases import all_cases
from scripts.aot.gates import failures
from scripts.aot.report import progress_line, write_tables
from scripts.aot.results import Result
from scripts.aot.runner import REPOSITORY, run_all

_DOCUMENT = REPOSITORY / "docs" / "kernels.md"
_RECORD = REPOSITORY / "docs" / "results" / "aot-check.json"


def main() -> int:
    """Compile what was asked for; 1 if a gate does not hold."""
    options = _parser().parse_args()
    cases = [case for case in all_cases() if all(part in case.name for part in options.only or [])]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        print(f"no case has {' and '.join(options.only)} in its name (see --list)", file=sys.stderr)
        return 2
    results: list[Result] = []

    def tell(result: Result) -> None:
        print(progress_line(result), flush=True)
        results.append(result)
        if options.json:  # each time, so that a run that is broken off leaves what it saw
            options.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")

    run_all(cases, jobs=options.jobs, tell=tell)
    if options.write_docs:
        _DOCUMENT.write_text(write_tables(_DOCUMENT.read_text(), record.add(_RECORD, results)))
    failed = [line for result in results for line in failures(result)]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    print(f"{len(cases)} cases, {len(failed)} failures")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aot_check",
        description="Compile the Pallas kernels and whole steps for GPUs that are not there, and look at the machine "
        "code. Exit code 1: a kernel spills, needs too much shared memory or lacks the instructions it was written "
        "for, or a step copies its cache.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only cases whose name has this in it; several must all be in it",
    )
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at a time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen there")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="add what was compiled to docs/results/aot-check.json, and make the tables of docs/kernels.md anew",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
