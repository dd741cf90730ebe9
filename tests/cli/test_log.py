from __future__ import annotations

import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cli.log import OneLineFormatter


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
