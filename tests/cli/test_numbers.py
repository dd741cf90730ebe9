"""Odd numbers on any command line, and in headers: one line that says what is wrong, never a traceback."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.__main__ import parse_arguments
from jaxserve.cli.chat import chat
from jaxserve.cli.main import run
from jaxserve.cli.plan_buckets import plan_buckets
from jaxserve.cli.serve import serve
from jaxserve.cli.simulate import simulate
from jaxserve.cli.trace import trace
from jaxserve.errors import InvalidRequestError
from jaxserve.plain_numbers import parse_float, parse_int
from jaxserve.server.service_level import ITL_HEADER, TTFT_HEADER, read_caller

NO_NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "1_0",
    "\u0661",
    "\uff11",
    "1e999",
    "",
    " 1",
    "0x10",
    "1e",
    "--",
    "1" * 5000,
)
ODD_NUMBERS = ("0", "-1", "1e-300", "1e300", "-1e300", "9" * 30, "0.5")


NUMBERS = {"trace": trace, "simulate": simulate, "serve": serve, "chat": chat, "plan-buckets": plan_buckets}


def numeric_flags(name: str) -> Iterator[str]:
    """Of the options that are one number."""
    for parameter, kind in typing.get_type_hints(NUMBERS[name]).items():
        if (
            {int, float} & {kind, *typing.get_args(kind)}
            and parameter != "return"
            and not isinstance(kind, tuple)
        ):
            yield f"--{parameter.replace('_', '-')}"


def refused(capsys: pytest.CaptureFixture[str], *mentions: str) -> None:
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", output.err), output.err
    for text in mentions:
        assert text in output.err


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_no_option_takes_what_is_not_finite(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    needed = {
        "trace": ["--output", missing],
        "simulate": ["--trace", missing, "--costs", missing],
        "serve": ["--model", missing],
        "chat": [],
        "plan-buckets": [missing],
    }[name]
    flags = list(numeric_flags(name))
    assert flags
    for flag in flags:
        for text in ("nan", "inf", "x"):
            assert run([name, *needed, f"{flag}={text}"]) == 2
            refused(capsys, flag)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_a_trace_of_odd_numbers_is_written_or_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.jsonl"
    kinds = [
        "--chat-share",
        "0.5",
        "--abort-share",
        "0.5",
        "--n-share",
        "0.3",
        "--off-seconds",
        "1",
        "--background-share",
        "0.2",
    ]
    for flag in numeric_flags("trace"):
        if flag == "--requests" and text in ("9" * 30, "1e300"):
            continue  # as many as were asked for
        given_flags = ["--requests", "4", *kinds, f"{flag}={text}"]
        code = run(["trace", "--output", str(file), *given_flags])
        if code == 0:
            written = file.read_text()
            assert "inf" not in written.lower()
            assert "nan" not in written.lower()
            assert run(["trace", "--from", str(file), "--output", str(tmp_path / "again.jsonl")]) == 0
            capsys.readouterr()
            file.unlink()
        else:
            assert code == 2, (flag, text)
            refused(capsys)
            assert not file.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["pressure", "--seconds"],
        ["pressure", "--loads"],
        ["simulation", "--rate"],
        ["static", "--workload", "x", "--repeats"],
        ["growth", "--queues"],
        ["soak", "--seed"],
        ["peers", "--workload", "x", "--rate"],
    ],
)
@pytest.mark.parametrize("text", [text for text in NO_NUMBERS if text != "--"])
def test_benches_take_no_odd_numbers_either(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([*flags[:-1], f"{flags[-1]}={text}"])
    assert ended.value.code == 2
    assert flags[-1] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("header", [TTFT_HEADER, ITL_HEADER])
@pytest.mark.parametrize("text", [*NO_NUMBERS, "0", "-1", "1e300", "1e-400"])
def test_headers_take_plain_numbers_only(header: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_caller({header: text})
    assert refusal.value.param == header
    assert header in str(refusal.value)


@given(st.text(max_size=12) | st.from_regex(r"[+-]?[0-9_.eE+-]{1,8}", fullmatch=True))
def test_what_is_taken_is_finite_and_what_python_reads_of_it(text: str) -> None:
    try:
        value = parse_float(text)
    except ValueError:
        pass
    else:
        assert math.isfinite(value)
        assert value == float(text)
        assert set(text) <= set("0123456789.eE+-")
    try:
        number = parse_int(text)
    except ValueError:
        return
    assert number == int(text) == parse_float(text)


@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e25, max_value=1e25),
    st.integers(-(10**20), 10**20),
)
def test_numbers_as_people_and_programs_write_them_are_taken(number: float, integer: int) -> None:
    assert parse_float(repr(number)) == number
    assert parse_float(str(integer)) == float(integer)
    assert parse_int(str(integer)) == integer
