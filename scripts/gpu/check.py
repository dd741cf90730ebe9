"""`scripts/gpu_check`: everything that only a GPU can answer, in one run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.jobs import Job, Outcome
from scripts.gpu.plan import check_jobs, environment_job, speed_jobs
from scripts.gpu.report import Report, to_json, to_markdown
from scripts.gpu.supervisor import run_jobs

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
_CPU_AT_ONCE = 2


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Correctness of every attention backend against the float64 reference, the engine on a random "
        "model, then timings against what the device can do and against other attention. Needs jax and numpy; parts "
        "whose packages are missing are left out and named. Exit codes: 0; 1 if a check failed; 2 for bad input.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "gpu_check_out")),
        metavar="DIR",
        help="for gpu_check.json and gpu_check.md [default: $OUT, else gpu_check_out]",
    )
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="stop by then, tuning aside [default: 7.5]"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only jobs with TEXT in their names (several: any); environment and ceilings always run",
    )
    parser.add_argument(
        "--tune",
        type=float,
        metavar="SECONDS",
        help="tune the kernels afterwards, for so long, and write DIR/tuning_table.json",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="test this program's logic on a CPU: interpreted kernels, tiny sizes",
    )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> int:
    """One run; returns the exit code. Files are brought up to date after every job."""
    started = time.monotonic()
    deadline = started + arguments.minutes * 60
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(command=shlex.join(["scripts/gpu_check", *sys.argv[1:]]))
    lock = threading.Lock()

    def done(job: Job, outcomes: Sequence[Outcome]) -> None:
        with lock:
            report.outcomes += outcomes
            report.seconds = time.monotonic() - started
            _write(report, arguments.out)
            _announce(job, outcomes, report.seconds)

    with tempfile.TemporaryDirectory() as work:
        checks = _chosen(check_jobs(cpu=arguments.cpu), arguments.only)
        speeds = _chosen(speed_jobs(cpu=arguments.cpu), arguments.only)
        common = {"cpu": arguments.cpu, "deadline": deadline, "done": done}
        found = run_jobs([environment_job()], work=Path(work, "environment"), at_once=1, **common)[0].data
        if found.get("platform", "gpu") != "gpu" and not arguments.cpu:
            print(
                f"error: no GPU is here, jax finds {found['device']}; --cpu tests the logic", file=sys.stderr
            )
            return EXIT_BAD_INPUT
        # All checks share the device, since most of their time goes into compiling; timings have it to themselves.
        together = _CPU_AT_ONCE if arguments.cpu else max(1, len(checks))
        run_jobs(checks, work=Path(work, "checks"), at_once=together, **common)
        run_jobs(speeds, work=Path(work, "speeds"), at_once=_CPU_AT_ONCE if arguments.cpu else 1, **common)
    if arguments.tune:
        from scripts.gpu.tune import tune_within

        report.tuning = tune_within(
            arguments.tune, cpu=arguments.cpu, table=arguments.out / "tuning_table.json", announce=_say
        )
    report.seconds = time.monotonic() - started
    _write(report, arguments.out)
    print(to_markdown(report))
    return EXIT_CHECK_FAILED if report.failures() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """What a person can mend is one line on stderr and code 2."""
    try:
        return run(parse_arguments(arguments))
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _chosen(jobs: list[Job], only: Sequence[str] | None) -> list[Job]:
    return [
        job for job in jobs if not only or job.name == "ceilings" or any(text in job.name for text in only)
    ]


def _write(report: Report, directory: Path) -> None:
    (directory / "gpu_check.json").write_text(json.dumps(to_json(report), indent=1) + "\n")
    (directory / "gpu_check.md").write_text(to_markdown(report))


def _announce(job: Job, outcomes: Sequence[Outcome], seconds: float) -> None:
    statuses = [outcome.status for outcome in outcomes]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    _say(f"{seconds:5.0f} s  {job.name}: {counts}")
    for outcome in outcomes:
        if outcome.fails_the_run:
            _say(f"         {outcome.name}: {outcome.note}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
