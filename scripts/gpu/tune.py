"""Sweeps tile sizes on the GPU that is here and writes the fastest into a tuning table."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pallas_kernels.paged_attention.tuning import ShapeClass, TuningConfig, read_table, write_table
from scripts.gpu.jobs import OK, Case, Job, Outcome
from scripts.gpu.plan import environment_job
from scripts.gpu.supervisor import run_jobs
from scripts.gpu.tune_candidates import (
    DECODE,
    PREFILL,
    SPLIT,
    Target,
    candidates,
    fastest,
    fields_of,
    targets,
    with_row,
)

Say = Callable[[str], None]
_CANDIDATE_S = 40.0  # after that long a candidate counts as hanging
_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".85"}


class TuningError(Exception):
    """Tuning can't begin; one line says why."""


def tune_within(
    seconds: float,
    *,
    cpu: bool,
    table: Path,
    announce: Say,
    chosen: Sequence[Target] | None = None,
    few: bool = False,
) -> list[str]:
    """Tune one target after the other while time lasts, and write `table` after each.

    Args:
      cpu: interpret, with tiny sizes: a test of the logic, whose times mean nothing.
      table: rows of other shapes in it are kept; where there is no such file it begins as the package's own.
      chosen: all unless given.
      few: two candidates a part at most.

    Returns:
      a line for each target: what was chosen and by how much it is faster.

    Raises:
      TuningError: there is no GPU.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as work:
        runner = _Runner(Path(work), cpu, deadline)
        device = runner.device()
        if device["platform"] != "gpu" and not cpu:
            raise TuningError(f"tuning needs a GPU, this is a {device['platform']}")
        source = f"measured on {device['device']}, {datetime.now(UTC):%Y-%m-%d}"
        lines = []
        for target in chosen or targets():
            line = _tune_target(target, runner, table, source, few=few)
            announce(line)
            lines.append(line)
        return lines


class _Runner:
    """Runs cases in worker processes until the time is over."""

    def __init__(self, work: Path, cpu: bool, deadline: float) -> None:
        self.cpu = cpu
        self._work, self._deadline, self._jobs = work, deadline, 0

    def device(self) -> dict[str, Any]:
        outcome = self._run(environment_job())[0]
        if outcome.status != OK:
            raise TuningError(f"no device answers: {outcome.note}")
        return dict(outcome.data)

    def measure(self, name: str, cases: Sequence[Case]) -> list[Outcome]:
        left = self._deadline - time.monotonic()
        stall = 120.0 if self.cpu else _CANDIDATE_S
        return self._run(Job(name, "tuning", cases, max(left, 0.0), stall, environment=_MEMORY))

    def _run(self, job: Job) -> list[Outcome]:
        self._jobs += 1
        return run_jobs(
            [job],
            cpu=self.cpu,
            work=self._work / str(self._jobs),
            deadline=self._deadline,
            at_once=1,
            done=lambda job, outcomes: None,
        )


def _tune_target(target: Target, runner: _Runner, table: Path, source: str, *, few: bool) -> str:
    asked = runner.measure("which row", [case_for(target, DECODE, None, cpu=runner.cpu)])[0]
    if asked.status != OK:
        return f"{target}: {asked.status}: {asked.note}"
    base = TuningConfig(**asked.data["base"])
    best, gains, missing = base, [], []
    for part in (DECODE, SPLIT, PREFILL):
        tried = candidates(target, part, best)[: 2 if few else None]
        cases = [case_for(target, part, config, cpu=runner.cpu) for config in tried]
        outcomes = runner.measure(f"{target} {part}", cases)
        times = {
            config: float(outcome.data["score"])
            for config, outcome in zip(tried, outcomes, strict=True)
            if outcome.status == OK
        }
        if not times:
            missing.append(part)
            gains.append(f"{part}: nothing ran; {outcomes[0].status}: {outcomes[0].note}")
            continue
        gain = f" ({times[best] / times[fastest(times)]:.2f}x)" if best in times else ""
        best = fastest(times)
        gains.append(f"{part} {fields_of(part, best)}{gain}, {len(times)} of {len(tried)} ran")
    if len(missing) == 3:
        return f"{target}: " + "; ".join(gains)
    if missing:
        source += f" (not {', '.join(missing)})"
    rows = read_table(table) if table.exists() else read_table()
    shape = ShapeClass(**asked.data["shape"])
    write_table(with_row(rows, target.backend, shape, best, source=source), table)
    return f"{target}: " + "; ".join(gains)


def case_for(target: Target, part: str, config: TuningConfig | None, *, cpu: bool) -> Case:
    """A candidate's case; without a configuration it only says which row of the table the target is."""
    attention = {
        "group": 4,
        "kv_heads": 8,
        "head_dim": target.head_dim,
        "block_size": 16,
        "dtype": target.dtype,
    }
    if cpu:
        attention |= {"group": 2, "kv_heads": 1}
    attention |= {"kv_dtype": target.kv_dtype, "scales": "head", "backend": target.backend}
    check = {"kv_heads": 2, "contexts": [0, 16, 63, 700, 2100, 5], "query_lens": [1, 1, 1, 1, 1, 70]}
    if cpu:
        check = {"kv_heads": 1, "contexts": [40, 3], "query_lens": [1, 5]}
    return {
        "name": f"{target} {part} {fields_of(part, config) if config else 'row'}",
        "kind": "tune",
        "backend": target.backend,
        "config": dataclasses.asdict(config) if config else None,
        "check": attention | check | {"padding": 1},
        "loads": [attention | load for load in _loads(part, cpu)],
    }


def _loads(part: str, cpu: bool) -> list[dict[str, Any]]:
    """What a part is timed with."""
    if part == PREFILL:
        if cpu:
            return [
                {
                    "pool_tokens": 512,
                    "chunk": 8,
                    "context": 16,
                    "tokens": 16,
                    "rows": 2,
                    "width": 4,
                    "launches": 1,
                }
            ]
        shared = {"pool_tokens": 2**20, "tokens": 8192, "rows": 16, "width": 512, "launches": 2}
        return [{**shared, "chunk": chunk, "context": context} for chunk, context in ((2048, 0), (512, 2048))]
    if cpu:
        return [{"pool_tokens": 512, "batch": 2, "context": 40, "width": 4, "launches": 1}]
    # A full batch, a small one, and one long context that lives on its splits. One shape: one compilation.
    shared = {"pool_tokens": 2**20, "width": 1024, "rows": 64, "launches": 4}
    return [{**shared, "batch": b, "context": c} for b, c in ((64, 8192), (16, 2048), (1, 16384))]
