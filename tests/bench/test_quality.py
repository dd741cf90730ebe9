"""What is measured of a number format, on a tiny model, against a forward pass of its own and hand-made answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.quality import (
    Exam,
    Report,
    Variant,
    _quality,
    measure_quality,
    read_exam,
    report,
    to_json,
)
from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.outputs import TokenLogprobs
from tests.checkpoint.tiny_files import tiny_config, tiny_tensors, write_huggingface
from tests.models.model_harness import sequence_logits

pytestmark = pytest.mark.usefixtures("quick_to_compile")

REPOSITORY = Path(__file__).resolve().parents[2]
EXAM = Exam("It was a bright cold day in April, and the clocks said", ("he", "hell", "cold day"), 24, 6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    tensors = {
        name: array * (0.3 if array.ndim == 2 else 1) for name, array in tiny_tensors(tiny_config()).items()
    }
    write_huggingface(folder / "model", tensors=tensors)
    shapes = [{"tokens": 8, "seqs": [2]}]
    (folder / "plan.json").write_text(json.dumps({"jaxserve_bucket_plan": 1, "shapes": shapes}))
    return folder


@pytest.fixture(scope="module")
def result(directory: Path) -> Report:
    options = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=8, num_blocks=20, bucket_plan=str(directory / "plan.json")
    )
    return measure_quality(str(directory / "model"), EXAM, options, variants=[Variant("float32", "int8")])


def test_perplexity_is_that_of_a_forward_pass(directory: Path, result: Report) -> None:
    checkpoint = open_checkpoint(directory / "model")
    logits = sequence_logits(checkpoint.config, checkpoint.load_params("float32"))
    ids = checkpoint.load_tokenizer().encode(EXAM.text)
    assert len(ids) % EXAM.window > 1
    losses = []
    for start in range(0, len(ids), EXAM.window):
        window = ids[start : start + EXAM.window]
        x = logits(window).astype(np.float64)
        normalizer = np.log(np.exp(x).sum(-1))
        losses += [normalizer[i] - x[i, token] for i, token in enumerate(window[1:])]
    assert result.num_scored == len(losses)
    assert result.qualities[0][1].perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_the_reference_agrees_with_itself(result: Report) -> None:
    (_, reference), (_, int8) = result.qualities
    assert (reference.equal, reference.mean_first_difference, reference.teacher_forced) == (1.0, None, 1.0)
    assert int8.perplexity != reference.perplexity
    assert int8.perplexity == pytest.approx(reference.perplexity, rel=0.2)


def test_it_is_reported(result: Report) -> None:
    lines = report(result).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["float32", "int8,"]
    facts = json.loads(json.dumps(to_json(result)))
    assert {"date", "commit", "machine", "versions", "window", "prompts"} <= set(facts)
    assert facts["variants"][1]["quantization"] == "int8"


def entries(*ranks: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id=7, logprob=-1.0, rank=rank, top=()) for rank in ranks]


def test_how_agreement_is_counted() -> None:
    quality = _quality(
        [-1.0, -3.0],
        reference=[(1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 1, 1)],
        answers=[(1, 2, 3), (4, 5, 0), (0, 8, 9), (1, 1, 1)],
        # The prompts' own tokens come first and do not count.
        followed=[entries(5, 5, 1, 1, 1), entries(1, 1, 2), entries(9, 3, 1, 1), entries(1, 1, 1)],
    )
    assert quality.perplexity == pytest.approx(np.exp(2))
    assert quality.equal == 0.5
    assert quality.mean_first_difference == 1.0  # (2 + 0) / 2
    assert quality.teacher_forced == pytest.approx(10 / 12)


@pytest.mark.parametrize(
    ("text", "prompts", "at_fault"),
    [
        (None, '["a"]', "text"),
        ("", '["a"]', "text"),
        ("a", None, "prompts"),
        ("a", "no", "prompts"),
        ("a", "[]", "prompts"),
        ("a", '["a", ""]', "prompts"),
        ("a", '{"a": "b"}', "prompts"),
    ],
)
def test_files_that_make_no_exam_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, prompts: str | None, at_fault: str
) -> None:
    for name, content in (("text", text), ("prompts", prompts)):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert main(["quality", "--text", str(tmp_path / "text"), "--prompts", str(tmp_path / "prompts")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / at_fault}")
    assert error.count("\n") == 1


def test_the_exam_of_the_repository_is_what_its_readme_says() -> None:
    folder = REPOSITORY / "workloads/quality"
    exam = read_exam(folder / "alice.txt", folder / "prompts.json")
    assert len(exam.prompts) == len(set(exam.prompts)) == 100
    assert len(exam.text.split()) == 4246
