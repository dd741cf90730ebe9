"""A real `jaxserve serve` in a process of its own, for tests that speak HTTP to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_LISTENING = re.compile(r"listening on (https?://\S+)")
REPOSITORY = Path(__file__).resolve().parents[1]
# For processes whose programs are compiled for a few steps: a third less time of the processor. What the optimised
# ones compute is proved in `tests/exactness`, in the tests' own process.
QUICK_TO_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
# The demo model has so much to compute that it takes longer that way.
QUICK_TO_RUN = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


class ServerProcess:
    """Starts the server on a free port; use it as a context manager.

    Leaving the context stops the server with SIGTERM and fails unless it ends by itself, with exit code 0.

    Args:
      model: what follows `--model`.
      arguments: further command-line flags.
      environment: added to this process's environment and QUICK_TO_COMPILE.
      start_timeout_s: how long loading and compiling may take.
    """

    def __init__(
        self,
        model: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._command = [
            *(sys.executable, "-m", "jaxserve", "serve"),
            *("--model", str(model), "--host", "127.0.0.1", "--port", "0"),
            *arguments,
        ]
        self._environment = {**os.environ, **QUICK_TO_COMPILE, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._environment["PYTHONPATH"] = os.pathsep.join(
            path for path in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if path
        )
        self._start_timeout_s = start_timeout_s
        self._lines: list[str] = []
        self._listening = threading.Event()
        self._base_url: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT`, without a slash at the end."""
        assert self._base_url is not None, "the server has not been started"
        return self._base_url

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def logs(self) -> str:
        """What the server has printed so far, stdout and stderr together."""
        return "".join(self._lines)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._running.poll()

    def start(self) -> Self:
        """Start it and wait until it listens; an AssertionError with the log if it ends or hangs instead."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listening.wait(self._start_timeout_s)
        if self._base_url is None:
            code = self._process.poll()
            self.kill()
            fault = "did not listen in time" if code is None else f"ended with exit code {code}"
            raise AssertionError(f"jaxserve serve {fault}:\n{self.logs}")
        return self

    def send_signal(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Exit code, once it has ended and everything it printed is in `logs`."""
        code = self._running.wait(timeout_s)
        assert self._reader is not None
        self._reader.join(timeout_s)
        return code

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then wait; AssertionError if it has to be killed."""
        if self._running.poll() is None:
            self._running.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"jaxserve serve ignored SIGTERM for {timeout_s:g} s:\n{self.logs}"
            ) from None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._running.kill()
        self.wait(30.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.kill()  # the test's own error says more than an exit code
            return
        ended_before = self._running.poll() is not None
        code = self.stop()
        if not ended_before:
            assert code == 0, f"jaxserve serve ended with exit code {code}:\n{self.logs}"

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the server has not been started"
        return self._process

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            match = _LISTENING.search(line)
            if match:
                self._base_url = match.group(1).rstrip("/")
                self._listening.set()
        self._listening.set()  # the end of its output wakes a waiting start() as well
