from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cli.log import JsonFormatter, LogFormat, OneLineFormatter, start_progress


@given(st.text())
def test_text_of_others_stays_within_its_line(text: str) -> None:
    formatter = OneLineFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%s failed", (text,), None)
    line = formatter.format(record)
    assert line.splitlines() == [line]
    assert line.startswith("ERROR ")
    assert "\x1b" not in line
    line.encode()


def test_a_traceback_can_forge_no_line() -> None:
    try:
        raise ValueError("first\nERROR forged \x1b[31m")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    first, *rest = OneLineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR it failed"
    assert rest
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in "".join(rest)


def test_how_far_a_start_is_is_an_object_where_every_line_is(capsys: pytest.CaptureFixture[str]) -> None:
    stream, log = io.StringIO(), logging.getLogger("jaxserve.progress")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        for log_format in LogFormat:
            with start_progress(log_format) as progress:
                progress("Loading weights", 0, 2)
                progress("Loading weights", 2, 2)
    finally:
        log.removeHandler(handler)
    first, last = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["logger"], first["message"]) == ("jaxserve.progress", "Loading weights ...")
    assert last["message"].startswith("Loading weights: 2/2")
    assert len(capsys.readouterr().err.splitlines()) == 2
