from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxserve.batch.bucket_plan_file import read_plan
from jaxserve.batch.buckets import default_num_shapes, default_shapes
from jaxserve.batch.step_sizes import StepLimits
from jaxserve.cli.main import run
from tests.batch.step_loads import at_once, steps_of, workload

LIMITS = StepLimits(256, 64)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    lines = ['{"jaxserve_steps": 1, "max_num_batched_tokens": 256, "max_num_seqs": 64}\n']
    for (tokens, seqs), count in steps_of(at_once(workload("mixed64")), LIMITS).weights.items():
        lines += [json.dumps({"tokens": tokens, "seqs": seqs}) + "\n"] * int(count)
    path.write_text("".join(lines))
    return path


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", line)]


def line_of(text: str, start: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_a_trace_becomes_a_plan_that_beats_the_default(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    assert run(["plan-buckets", str(trace), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    plan = read_plan(output)
    num_shapes = sum(len(rows) for _, rows in plan)
    assert num_shapes <= default_num_shapes(LIMITS)
    assert plan[-1][0] == 256
    assert plan[-1][1][-1] == 64
    mine, default = numbers(line_of(out, "packing efficiency").partition(")")[2])
    assert mine >= 95
    assert mine > default
    assert numbers(line_of(out, "shapes"))[0] == num_shapes
    table = [line for line in out.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert [(int(a), int(b)) for a, b, *_ in map(numbers, table)] == [
        (tokens, seqs) for tokens, rows in plan for seqs in rows
    ]
    assert sum(numbers(line)[2] for line in table) == pytest.approx(100, abs=1)
    # The same steps against that plan: nothing to gain.
    assert run(["plan-buckets", str(trace), "--against", str(output)]) == 0
    mine, other = numbers(line_of(capsys.readouterr().out, "packing efficiency").partition(")")[2])
    assert mine == other


@pytest.mark.parametrize("shapes", [1, 3, 40])
def test_a_plan_keeps_its_budget_and_holds_larger_limits_than_the_traces(
    trace: Path, tmp_path: Path, shapes: int
) -> None:
    output = tmp_path / "plan.json"
    limits = ["--max-num-seqs", "100", "--max-num-batched-tokens", "300"]
    assert run(["plan-buckets", str(trace), "--shapes", str(shapes), *limits, "--output", str(output)]) == 0
    plan = read_plan(output)
    assert sum(len(rows) for _, rows in plan) <= shapes
    assert (plan[-1][0], plan[-1][1][-1]) == (300, 100)


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--max-num-batched-tokens", "200", "--max-num-seqs", "8"], ["beyond the limits of 200 and 8"]),
        (["--max-num-batched-tokens", "8"], ["must be at least --max-num-seqs (64)"]),
        (["--shapes", "0"], ["--shapes"]),
        (["--against", "broken.json"], ["broken.json", "not JSON"]),
        (["--against", "small.json"], ["4 tokens and 4 sequences"]),
        (["--output", "missing/plan.json"], ["missing"]),
    ],
)
def test_what_cannot_be_done_is_one_line(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    mentions: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    small = {"jaxserve_bucket_plan": 1, "shapes": [{"tokens": 4, "seqs": [4]}]}
    Path("small.json").write_text(json.dumps(small))
    assert run(["plan-buckets", str(trace), *arguments]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert all(text in err for text in mentions), err


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"custom_id": "a"}\n')
    assert run(["plan-buckets", str(path)]) == 2
    assert re.fullmatch(r"error: [^\n]*answers.jsonl[^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["serve", "batch"])
@pytest.mark.parametrize("content", ["{", '{"jaxserve_bucket_plan": 1, "shapes": []}'])
def test_a_damaged_plan_is_refused_before_the_model_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    plan, questions = tmp_path / "plan.json", tmp_path / "questions.jsonl"
    plan.write_text(content)
    questions.write_text("")
    files = [str(questions), str(tmp_path / "answers.jsonl")] if command == "batch" else ["--port", "0"]
    assert run([command, *files, "--model", str(tmp_path / "no-model"), "--bucket-plan", str(plan)]) == 2
    assert re.fullmatch(r"error: [^\n]*plan.json[^\n]*\n", capsys.readouterr().err)


def test_typical_steps_alone_give_the_default(trace: Path, tmp_path: Path) -> None:
    """What runs without a plan is the plan for typical steps."""
    output = tmp_path / "plan.json"
    assert run(["plan-buckets", str(trace), "--typical-share", "1", "--output", str(output)]) == 0
    assert read_plan(output) == default_shapes(LIMITS)
