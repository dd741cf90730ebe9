from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.cli.main import run
from tests.cli.command import run_jaxserve

SMALL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "1024")


def line(custom_id: str, prompt: str, **fields: object) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def test_a_file_is_answered_and_the_exit_code_tells_of_failures(
    tiny_checkpoint_dir: Path, tmp_path: Path
) -> None:
    source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompt = " ".join(f"word{i}" for i in range(40))
    source.write_text(
        "\n".join([*(line(f"id{i}", prompt) for i in range(5)), "not json", line("x", "a", foo=1)])
    )
    arguments = (
        "batch",
        source,
        destination,
        "--model",
        tiny_checkpoint_dir,
        *SMALL,
        "--served-model-name",
        "tiny",
    )
    result = run_jaxserve(*arguments)
    assert result.returncode == 1, result.stderr
    assert "5 ok; 2 failed" in result.stdout
    records = [json.loads(text) for text in destination.read_text().splitlines()]
    assert [record["custom_id"] for record in records] == [*(f"id{i}" for i in range(5)), None, "x"]
    answers = [record["response"]["body"] for record in records[:5]]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [record["error"]["line"] for record in records[5:]] == [6, 7]
    source.write_text("".join(line(f"id{i}", "Hi") + "\n" for i in range(3)))
    result = run_jaxserve(*arguments)
    assert result.returncode == 0, result.stderr
    assert len(destination.read_text().splitlines()) == 3


def test_bad_usage_is_one_line_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    missing = tmp_path / "missing"
    for arguments, mention in (
        ((missing, tmp_path / "out"), "missing"),
        ((source, missing / "out"), "missing"),
        ((source, tmp_path), str(tmp_path)),
        ((source, source), "in.jsonl"),
        ((tmp_path, tmp_path / "out"), str(tmp_path)),
    ):
        assert run(["batch", *map(str, arguments), "--model", "no-such-model"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert mention in printed.err
    assert source.read_text() == ""
