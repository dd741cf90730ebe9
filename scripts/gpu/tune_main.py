"""The command line of `scripts/tune_kernels`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.paged_attention.spec import H200, AttentionSpec
from pallas_kernels.paged_attention.tuning import TABLE, find_config, shape_class
from scripts.gpu.tune import TuningError, tune_within
from scripts.gpu.tune_candidates import DECODE, PREFILL, SPLIT, Target, candidates, describe, targets

EXIT_BAD_INPUT = 2
_NO_LIMIT_S = 24 * 3600.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/tune_kernels",
        description="Times the tile sizes of the Pallas kernels on the GPU that is here, each checked against the "
        "reference first, and writes the fastest into the tuning table, with the device's name and the date.",
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="targets with TEXT in their names (several: any)"
    )
    parser.add_argument("--seconds", type=float, default=_NO_LIMIT_S, help="begin no more after that long")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="the table to write [default: the package's]"
    )
    parser.add_argument("--dry-run", action="store_true", help="list targets and candidates, run nothing")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="test the logic on a CPU: tiny sizes, few candidates, and a temporary table unless --table names one",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    chosen = [t for t in targets() if not options.only or any(text in str(t) for text in options.only)]
    if not chosen:
        return _refuse(f"no target matches; there are: {'; '.join(map(str, targets()))}")
    if options.dry_run:
        print("\n".join(_listing(chosen)))
        return 0
    if options.table is not None and not options.table.absolute().parent.is_dir():
        return _refuse(f"{options.table}: there is no such folder")
    table = options.table or (_temporary_table() if options.interpret else TABLE)
    try:
        tune_within(
            options.seconds,
            cpu=options.interpret,
            table=table,
            announce=lambda line: print(line, flush=True),
            chosen=chosen,
            few=options.interpret,
        )
    except TuningError as error:
        return _refuse(f"{error}; --interpret tests the logic here, --dry-run lists what would be tried")
    print(f"table: {table}")
    return 0


def _listing(chosen: Sequence[Target]) -> list[str]:
    """Candidates of every target, around the row that the table has for an H200."""
    lines = []
    for target in chosen:
        spec = AttentionSpec(4, 1, target.head_dim, 16, target.dtype, target.kv_dtype)
        base = find_config(target.backend, shape_class(spec, H200))
        for part in (DECODE, SPLIT, PREFILL):
            tried = candidates(target, part, base)
            lines.append(f"{target}: {part}: {len(tried)} candidates")
            lines += [f"  {fields}" for fields in describe(tried, part)]
    return lines


def _temporary_table() -> Path:
    return Path(tempfile.mkdtemp(prefix="tune_kernels_")) / "tuning_table.json"


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return EXIT_BAD_INPUT
