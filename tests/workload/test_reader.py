"""Public traces become requests with the prefixes that they name; a fault in a file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.workload.reader import read_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9999600,110,0
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 9]},
    {"timestamp": 4500, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 4500, "input_length": 600, "output_length": 0, "hash_ids": [7, 11]},
]


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    for text in (AZURE, "\ufeff" + AZURE.replace("\n", "\r\n")):
        path.write_text(text)
        requests = read_workload(path).requests
        assert [r.arrival for r in requests] == pytest.approx([0.0, 0.02, 0.052])
        assert [(r.num_prompt_tokens, r.max_tokens) for r in requests] == [(4808, 10), (110, 1), (3180, 8)]
        assert len({r.prompt_token_ids[:50] for r in requests}) == 3
    assert len(read_workload(path, limit=2).requests) == 2
    path.write_text("TIMESTAMP,GeneratedTokens,ContextTokens\n2024-05-10 00:00:00.009930+00:00,3,9\n")
    [request] = read_workload(path).requests
    assert (request.num_prompt_tokens, request.max_tokens) == (9, 3)


def test_mooncake_shares_what_has_the_same_hash_ids(tmp_path: Path) -> None:
    requests = read_workload(write(tmp_path / "m.jsonl", [*MOONCAKE])).requests
    assert [r.arrival for r in requests] == [0.0, 3.5, 3.5]
    assert [(r.num_prompt_tokens, r.max_tokens) for r in requests] == [(1030, 3), (1024, 5), (600, 1)]
    first, second, third = (r.prompt_token_ids for r in requests)
    assert first[:1024] == second
    assert third[:512] == first[:512]
    assert third[512:560] != first[512:560]
    assert len(set(first[:512])) > 400  # text of its own, not one token over and over


OURS = {"jaxserve_workload": 1}
LINE = {"arrival": 1.0, "max_tokens": 3, "prompt_token_ids": [4]}


@pytest.mark.parametrize(
    ("name", "content", "mentions"),
    [
        ("a.csv", AZURE.replace("3180", "many"), ["line 3", "ContextTokens", "'many'"]),
        ("a.csv", AZURE.replace("18:17:04.0319600", "teatime"), ["line 3", "TIMESTAMP"]),
        (
            "a.csv",
            AZURE.replace("2023-11-16 18:17:04.0319600", "2023-11-16T18:17:04Z"),
            ["line 3", "TIMESTAMP"],
        ),
        ("a.csv", AZURE.replace(",3180,8", ",3180"), ["line 3", "2 of 3 columns"]),
        ("a.csv", AZURE.replace("GeneratedTokens", "Tokens"), ["line 1", "GeneratedTokens"]),
        ("a.csv", AZURE.splitlines()[0] + "\n", ["no request"]),
        ("m.jsonl", [MOONCAKE[0], {**MOONCAKE[1], "input_length": 1025}], ["line 2", "hash_ids", "1025"]),
        ("m.jsonl", [MOONCAKE[0], {**MOONCAKE[1], "input_length": 512}], ["line 2", "hash_ids"]),
        ("m.jsonl", [MOONCAKE[0], {**MOONCAKE[1], "timestamp": "x"}], ["line 2", "timestamp"]),
        ("m.jsonl", [MOONCAKE[0], {"timestamp": 2}], ["line 2", "input_length"]),
        ("o.jsonl", [OURS, LINE, {**LINE, "max_tokens": 0}], ["line 3", "max_tokens"]),
        ("o.jsonl", [OURS, LINE, {**LINE, "color": 0}], ["line 3", "color"]),
        ("o.jsonl", [OURS, LINE, {**LINE, "n": 0}], ["line 3", "n must be"]),
        ("o.jsonl", [OURS, LINE, {**LINE, "stop": [""]}], ["line 3", "stop"]),
        ("o.jsonl", [OURS, {"max_tokens": 3}], ["line 2", "prompt"]),
        ("o.jsonl", [OURS, {**LINE, "prompt": [["k", 2]]}], ["line 2", "either"]),
        ("o.jsonl", [OURS, LINE, {**LINE, "arrival": 0.5}], ["order of arrival"]),
        ("o.jsonl", [{"jaxserve_workload": 9}, LINE], ["line 1", "version 9"]),
        ("o.jsonl", [{**OURS, "vocabulary": [5, 5]}, LINE], ["line 1", "vocabulary"]),
        ("o.jsonl", [OURS], ["no request"]),
        ("o.jsonl", b'{"jaxserve_workload": 1}\n{"max_tokens": \xff}\n', ["line 2"]),
        ("o.jsonl", b'{"jaxserve_workload": 1}\n{"max_tokens": 3, "prompt_tok', ["line 2"]),
        ("other.txt", b"hello\n", ["not JSON"]),
    ],
)
def test_a_fault_is_named_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes | list[object], mentions: list[str]
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        write(path, content)
    with pytest.raises(ConfigError) as error:
        read_workload(path)
    assert "\n" not in str(error.value)
    for text in (str(path), *mentions):
        assert text in str(error.value)


def test_empty_lines_are_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps(OURS) + "\n\n" + json.dumps(LINE) + "\n\n")
    assert len(read_workload(path).requests) == 1
