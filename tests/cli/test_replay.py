"""What an engine with a real model has done is done again bit for bit, or the command says what differs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, Grammar, GrammarKind, SamplingParams
from jaxserve.cli.main import run
from jaxserve.recording.costs_file import read_costs

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": 8,
    "num_blocks": 20,  # fewer than the requests want together
    "dtype": "float32",
}


def record(model: Path, path: Path, **options: Any) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=20, n=2),
        SamplingParams(temperature=1.1, seed=3, max_tokens=30, stop=("e",), repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1),
        SamplingParams(
            temperature=0.8, max_tokens=20, grammar=Grammar(GrammarKind.REGEX, "[a-f]{3}(,[0-9]{2}){2}")
        ),
    ]
    with LLM(model, record=str(path), **LIMITS, **options) as llm:
        for part in llm.stream([7, 8, 9], params[0]):
            if part.text:
                break  # and go away
        llm.generate([list(range(5, 40)), [3, 4], list(range(5, 33)), [9] * 17, [8] * 9], params)
        long = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True)
        llm.generate([list(range(first, first + 33)) for first in (50, 90, 130, 170)], long)


@pytest.fixture(scope="module")
def recording(tiny_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    record(tiny_checkpoint_dir, folder / "traffic.jsonl", record_costs=str(folder / "costs.json"))
    return folder / "traffic.jsonl"


def changed(recording: Path, path: Path, old: str, new: str, line: int) -> Path:
    """A copy in which one line of the recording says something else."""
    lines = recording.read_text().splitlines(keepends=True)
    assert len(re.findall(old, lines[line])) >= 1, lines[line]
    lines[line] = re.sub(old, new, lines[line], count=1)
    path.write_text("".join(lines))
    return path


def test_the_default_mode_replays_bit_for_bit(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(recording)]) == 0, capsys.readouterr()
    out, err = capsys.readouterr()
    assert re.fullmatch(r"the same: \d+ steps, 10 requests, \d+ tokens\n", out)
    assert "warning" not in err
    plans = [json.loads(line).get("plan") or {} for line in recording.read_text().splitlines()]
    assert any(plan.get("preempted") for plan in plans), "the pool was to be too small"
    assert any(plan.get("block_copies") for plan in plans), "n=2 was to fork"


def test_deterministic_mode_replays_bit_for_bit(
    tiny_checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traffic.jsonl"
    record(tiny_checkpoint_dir, path, deterministic=True)
    assert run(["replay", str(path)]) == 0, capsys.readouterr()


def test_another_token_and_another_engine_are_told(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_text().splitlines()
    sampled = [number for number, line in enumerate(lines) if '"tokens":{"' in line]
    at = sampled[len(sampled) // 2]
    step = sum('"event":"step"' in line for line in lines[:at])
    path = changed(recording, tmp_path / "t.jsonl", r'"tokens":\{"([^"]+)":\[\d+', r'"tokens":{"\1":[1', at)
    assert run(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"differs at step {step} (event {at - 1}), request ")
    assert "recorded were [1]" in out
    # The shapes are made anew for every engine, so this one is refused only once it is there.
    path = changed(recording, tmp_path / "e.jsonl", '"max_waiting":4096', '"max_waiting":7', 0)
    assert run(["replay", str(path)]) == 2
    assert re.search(r"error: [^\n]*max_waiting is 4096, recorded was 7\n", capsys.readouterr().err)


def test_another_policy_needs_no_model(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["replay", str(recording), "--model", "nowhere", "--policy"]
    assert run([*flags, "jaxserve.scheduler.fair_policy:FairPolicy"]) == 0
    assert "decides the same in all" in capsys.readouterr().out
    assert run([*flags, "tests.cli.last_come_first_served:LastComeFirstServed"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"tests\S+ departs at step \d+: \S+ computes \d+ tokens? from \d+ on instead of ", out)
    assert out.count("all TTFT") == 2
    assert run([*flags, "no.such:Policy"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_costs_are_written_when_the_engine_ends(recording: Path) -> None:
    costs = read_costs(recording.with_name("costs.json"))
    assert costs.engine.num_blocks == 20
    assert costs.step_time_model(lambda tokens, seqs: (tokens, seqs)).is_ready
