"""Workload files are read whole or refused with the request at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.errors import ConfigError
from jaxserve.workload.reader import read_workload

WORKLOADS = Path(__file__).resolve().parents[2] / "workloads"
GOOD = {"prompt_token_ids": [5, 6, 7], "max_tokens": 2}


def test_reads_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps([GOOD, {"prompt_token_ids": [8], "max_tokens": 9}]))
    workload = read_workload(path)
    assert workload.name == "two"
    assert [item.prompt_token_ids for item in workload.requests] == [(5, 6, 7), (8,)]
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (4, 11)
    assert len(read_workload(path, limit=1).requests) == 1


def test_requests_are_greedy_and_end_by_their_length_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([GOOD]))
    params = read_workload(path).requests[0].request("r").params
    assert (params.is_greedy, params.ignore_eos, params.max_tokens) == (True, True, 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "at least one request"),
        ('{"requests": []}', "must be a list"),
        (json.dumps([GOOD, 3]), "request 1: must be an object"),
        (json.dumps([{**GOOD, "temperature": 1}]), "exactly the keys"),
        (json.dumps([{"max_tokens": 2}]), "exactly the keys"),
        (json.dumps([{**GOOD, "prompt_token_ids": []}]), "prompt_token_ids"),
        (json.dumps([{**GOOD, "prompt_token_ids": [1, True]}]), "prompt_token_ids"),
        (json.dumps([{**GOOD, "prompt_token_ids": "text"}]), "prompt_token_ids"),
        (json.dumps([{**GOOD, "max_tokens": 0}]), "max_tokens"),
        (json.dumps([{**GOOD, "max_tokens": 1.5}]), "max_tokens"),
    ],
)
def test_a_bad_file_is_one_line_with_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, fault: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_workload(path)
    assert str(path) in str(error.value)
    assert fault in str(error.value)
    assert main(["static", "--workload", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--workload", "missing.json"], ["--workload", str(WORKLOADS / "mixed16.json"), "--json", "no/such/x"]],
)
def test_bad_paths_are_found_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["static", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("name", "sizes"), [("mixed16", (16, 3014, 1213)), ("mixed64", (64, 8447, 5570))])
def test_the_workloads_of_the_repository_are_what_their_readme_says(
    name: str, sizes: tuple[int, int, int]
) -> None:
    workload = read_workload(WORKLOADS / f"{name}.json")
    assert (len(workload.requests), workload.num_prompt_tokens, workload.num_output_tokens) == sizes
    row = next(
        line for line in (WORKLOADS / "README.md").read_text().splitlines() if f"`{name}.json`" in line
    )
    assert [int(cell.replace(",", "")) for cell in row.split("|")[2:5]] == list(sizes)
