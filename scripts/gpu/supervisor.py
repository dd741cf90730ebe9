"""Runs jobs in worker processes: time limits, and a fresh process after one that died or hung."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.gpu.jobs import DIED, HUNG, NOT_RUN, Case, Job, Outcome

REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
_LOG_TAIL = 700


def run_jobs(
    jobs: Sequence[Job],
    *,
    cpu: bool,
    work: Path,
    deadline: float,
    at_once: int,
    done: Callable[[Job, list[Outcome]], None],
) -> list[Outcome]:
    """The outcomes of every case of every job, in order.

    Args:
      work: an empty folder for files that nobody needs afterwards.
      deadline: on `time.monotonic`'s clock; no job runs past it.
      at_once: jobs that run at the same time.
      done: called when a job has ended (from the job's thread).
    """

    def run(index: int) -> list[Outcome]:
        job = jobs[index]
        outcomes = _Supervision(job, cpu, work / str(index), deadline).run()
        done(job, outcomes)
        return outcomes

    with ThreadPoolExecutor(at_once) as pool:
        return [outcome for outcomes in pool.map(run, range(len(jobs))) for outcome in outcomes]


class _Supervision:
    """One job's way through as many processes as it takes."""

    def __init__(self, job: Job, cpu: bool, work: Path, deadline: float) -> None:
        work.mkdir(parents=True)
        self._job, self._cpu, self._work = job, cpu, work
        self._end = min(deadline, time.monotonic() + job.budget_s)
        self._waiting: list[Case] = list(job.cases)
        self._outcomes: dict[str, Outcome] = {}

    def run(self) -> list[Outcome]:
        attempt = 0
        while self._waiting and time.monotonic() < self._end:
            self._attempt(self._work / str(attempt))
            attempt += 1
        for case in self._waiting:
            self._add(case, NOT_RUN, note="no time was left")
        return [self._outcomes[case["name"]] for case in self._job.cases]

    def _attempt(self, stem: Path) -> None:
        """One process. At least one case has an outcome afterwards, so this ends."""
        cases_file, results, log = (stem.with_suffix(s) for s in (".cases", ".results", ".log"))
        cases_file.write_text(json.dumps({"cpu": self._cpu, "cases": self._waiting}))
        results.touch()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "scripts.gpu.worker", str(cases_file), str(results)],
                cwd=REPOSITORY,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            verdict = self._watch(process, results)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        before = len(self._waiting)
        running = self._read(results)
        blamed = [running] if running else []
        if not running and len(self._waiting) == before:  # it did not get as far as its first case
            blamed = list(self._waiting)
        status, note = verdict or (DIED, _describe_exit(process.returncode))
        tail = " ".join(log.read_text(errors="replace")[-_LOG_TAIL:].split())
        for case in blamed:
            self._add(case, status, note=f"{note}; last words: {tail}")

    def _watch(self, process: subprocess.Popen[bytes], results: Path) -> tuple[str, str] | None:
        """Wait for the end; (status, note) for whoever was running when time was up."""
        size, changed = 0, time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if results.stat().st_size != size:
                size, changed = results.stat().st_size, now
            if now >= self._end:
                return NOT_RUN, f"stopped: the job's {self._job.budget_s:.0f} s, or the run's time, were over"
            if now - changed > self._job.stall_s:
                return HUNG, f"no end after {self._job.stall_s:.0f} s"
            time.sleep(_POLL_S)
        return None

    def _read(self, results: Path) -> Case | None:
        """Take in what a process wrote; returns the case that it had begun and not ended."""
        by_name = {case["name"]: case for case in self._waiting}
        running = None
        for line in results.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            if "start" in event:
                running = by_name[event["start"]]
            else:
                self._add(
                    by_name[event["end"]],
                    event["status"],
                    data=event.get("data") or {},
                    note=event.get("note", ""),
                    seconds=event["seconds"],
                )
                running = None
        return running

    def _add(self, case: Case, status: str, **more: object) -> None:
        job = self._job
        self._waiting.remove(case)
        self._outcomes[case["name"]] = Outcome(
            job.section,
            job.name,
            case,
            status,
            is_check=job.is_check,
            **more,  # type: ignore[arg-type]
        )

    def _environment(self) -> dict[str, str]:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self._cpu:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # quick to compile
        return environment | dict(self._job.environment)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code}"
    return f"the process was ended by {signal.Signals(-code).name}"
