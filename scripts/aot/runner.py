"""Runs cases, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.aot import dumps
from scripts.aot.cases import KernelCase, StepCase
from scripts.aot.results import Result

REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT = 900  # seconds; the slowest case takes a few dozen on two old cores


def cuda_tools() -> Path:
    """Where the environment's ptxas, cuobjdump and nvdisasm are."""
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"


def run_all(cases: list[KernelCase | StepCase], *, jobs: int, tell: Callable[[Result], None]) -> None:
    """`tell` hears the results in the order of the cases, each as soon as it and those before it are there."""
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(run_one, cases):
            tell(result)


def run_one(case: KernelCase | StepCase) -> Result:
    """Compile one case. Whatever happens to the process becomes a result."""
    with tempfile.TemporaryDirectory(prefix="jaxserve_aot_check_") as scratch:
        folder, answer = Path(scratch) / "dump", Path(scratch) / "result.json"
        environment = {
            **os.environ,
            **dumps.environment(folder),
            "JAX_PLATFORMS": "cpu",  # a CUDA plugin without a driver logs a traceback when it is asked for devices
            "JAX_TRACEBACK_FILTERING": "off",  # the error's line comes last
            "PATH": f"{cuda_tools()}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
        }
        command = [sys.executable, "-m", "scripts.aot.child", case.name, str(folder), str(answer)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return Result(case, "failed", detail=f"not done after {_TIMEOUT} s")
        if done.returncode or not answer.exists():
            return Result(case, "failed", detail=describe_end(done.returncode, done.stderr))
        return Result.from_json(json.loads(answer.read_text()))


def describe_end(code: int, stderr: str) -> str:
    """One line on how a process ended: its signal or exit code, and the error that it printed."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # An exception's own line, or what XLA says before it aborts; else the last thing that was printed.
    errors = [line for line in lines if re.search(r"Error: |^F\d{4} ", line)]
    said = (errors or lines or ["nothing printed"])[-1]
    return f"{how}: {said[:400]}"
