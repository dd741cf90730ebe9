"""A server that a command starts: its own process group, its log, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxserve.bench.peers.peer import PORT, Peer
from jaxserve.errors import ConfigError

_TERM_GRACE_S = 20.0
_KILL_GRACE_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Running:
    """A server that may not be ready yet.

    Attributes:
      url: without a slash at the end.
      process: leader of its group; None for a server that somebody else started.
      log: what the group prints.
    """

    url: str
    process: subprocess.Popen[bytes] | None
    log: Path | None

    def exit_code(self, *, grace_s: float = 0.0) -> int | None:
        """None while it runs, and for a server that is not ours to watch.

        Args:
          grace_s: wait so long for its end, where there is reason to expect it.
        """
        if self.process is None:
            return None
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return None

    def resident_bytes(self) -> int:
        """Memory of the process, on Linux; 0 elsewhere, and of a server that is not ours to watch."""
        if self.process is None:
            return 0
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)

    def last_words(self, lines: int = 3) -> str:
        """The end of its log, on one line; empty where there is none."""
        if self.log is None:
            return ""
        printed = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(printed[-lines:])[-600:]


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[Running]:
    """The peer's server, for as long as the context lasts. What a command started has ended afterwards, all of it.

    Raises:
      ConfigError: the command can't be run.
    """
    if peer.command is None:
        assert peer.url is not None
        yield Running(peer.url, None, None)
        return
    port = str(_free_port())
    command = [word.replace(PORT, port) for word in peer.command]
    with tempfile.TemporaryDirectory(prefix="jaxserve-peer-") as folder:
        log = Path(folder) / "log"
        process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("wb") as output, _signals_held_back():
                process = _start(peer.name, command, output)
            yield Running(f"http://127.0.0.1:{port}", process, log)
        finally:
            if process is not None:
                _end_group(process)


def _start(name: str, command: Sequence[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that workers can be ended with it
        )
    except OSError as error:
        raise ConfigError(f"peer {name!r}: {command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Those that mean to end us come behind the body, so that it is whole. They can't be blocked: what is started
    there would inherit that.
    """
    if threading.current_thread() is not threading.main_thread():  # which gets none
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {one: signal.signal(one, lambda number, frame: held.append(number)) for one in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in held:
            signal.raise_signal(number)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the whole group, SIGKILL to what is left after a while."""
    for number, grace in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        deadline = time.monotonic() + grace
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not _group_lives(process):
            return


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, who would count as alive otherwise
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
