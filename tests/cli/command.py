"""Runs the real `jaxserve` command in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.server_process import QUICK_TO_COMPILE, REPOSITORY


def command_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if name != "JAXSERVE_DEBUG"}
    return {
        **inherited,
        **QUICK_TO_COMPILE,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **(extra or {}),
    }


def run_jaxserve(
    *arguments: str | Path,
    stdin: bytes | str = b"",
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Output is decoded as UTF-8 with replacement, so that a test sees whatever was printed."""
    result = subprocess.run(
        [sys.executable, "-m", "jaxserve", *map(str, arguments)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        env=command_environment(environment),
        cwd=cwd,
        capture_output=True,
        timeout=timeout_s,
    )
    return subprocess.CompletedProcess(
        result.args,
        result.returncode,
        result.stdout.decode(errors="replace"),
        result.stderr.decode(errors="replace"),
    )


def assert_refused(result: subprocess.CompletedProcess[str], *mentions: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that names each of `mentions`."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    for text in mentions:
        assert text in result.stderr
