"""What commands that run an engine log: warnings, the few lines that say how it starts, and a line a request."""

from __future__ import annotations

import enum
import json
import logging
import queue
import re
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from jaxserve.progress import BarProgress

_TOLD = (
    "pallas_kernels",  # which attention backend runs
    "jaxserve.memory",  # what it is for
    "jaxserve.executables",  # why programs are compiled again
    "jaxserve.programs",  # when all of them are ready
    "jaxserve.progress",  # how far the start is, where bars would break the format
)
_REQUESTS = "jaxserve.requests"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAX_PENDING = 10_000  # lines that may wait for whoever reads the log
_CLOSE_SECONDS = 2.0


class LogFormat(enum.StrEnum):
    """How lines look."""

    text = "text"
    json = "json"


class OneLineFormatter(logging.Formatter):
    """Text of others in a message can neither begin a line of its own nor steer a terminal.

    A message is one line, with control characters escaped; a traceback's lines come indented below it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None] | Any,
    ) -> str:
        return "\n".join("  " + _escaped(line) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """An object a line, in ASCII: `time` (UTC), `level`, `logger`, `message`; `exception`, a traceback; and what
    `record.fields` holds, in the place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class BackgroundHandler(logging.Handler):
    """Writes lines in a thread of its own, so that a log that nobody reads, or a slow disk, holds up no request.

    What does not fit into the queue is left out, and counted in a line of the log.
    """

    def __init__(self, stream: TextIO, *, max_pending: int = _MAX_PENDING) -> None:
        super().__init__()
        self._stream = stream
        self._pending: queue.Queue[str | None] = queue.Queue(max_pending)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_on, name="jaxserve-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._left_out and not self._pending.full():
                missed, self._left_out = self._left_out, 0
                text = f"{missed} lines were left out: the log was not read fast enough"
                self._pending.put_nowait(self.format(_notice(record.name, text)))
            self._pending.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Write what is there, if somebody reads it soon."""
        super().close()
        try:
            self._pending.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _write_on(self) -> None:
        while (line := self._pending.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # whoever read the log is gone


def show_log(log_format: LogFormat = LogFormat.text) -> None:
    """On stderr."""
    handler = logging.StreamHandler()
    requests = BackgroundHandler(handler.stream)
    for one in (handler, requests):
        if log_format is LogFormat.json:
            one.setFormatter(JsonFormatter())
        else:
            one.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in (*_TOLD, _REQUESTS):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger(_REQUESTS).propagate = False
    logging.getLogger(_REQUESTS).addHandler(requests)


def start_progress(log_format: LogFormat) -> BarProgress:
    """Shows how far a start is: as ever, or in lines of a log whose every line is an object."""
    if log_format is LogFormat.text:
        return BarProgress()
    return BarProgress(interactive=False, write_line=logging.getLogger("jaxserve.progress").info)


def _notice(name: str, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
