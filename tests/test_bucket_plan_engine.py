"""A plan and a recording in a real engine: the shapes that are compiled, and what comes against what was expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.batch.bucket_expectation import expect
from jaxserve.batch.bucket_plan import StepCost
from jaxserve.batch.bucket_plan_file import read_plan
from jaxserve.batch.buckets import planned_buckets
from jaxserve.batch.step_trace import read_trace
from jaxserve.config import EngineConfig
from jaxserve.engine_factory import create_engine
from jaxserve.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SHAPES = [{"tokens": 3, "seqs": [3]}, {"tokens": 40, "seqs": [2, 6]}]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}


def plan_file(folder: Path, shapes: object = SHAPES) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"jaxserve_bucket_plan": 1, "shapes": shapes}))
    return path


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_an_engine_runs_a_plan_and_what_comes_is_what_its_trace_says(
    tiny_checkpoint_dir: Path, tmp_path: Path, scheduler: str
) -> None:
    plan, steps = plan_file(tmp_path), tmp_path / "steps.jsonl"
    prompts = [list(range(100, 100 + length)) for length in (1, 2, 5, 17, 30, 9)]
    with LLM(
        tiny_checkpoint_dir,
        progress=False,
        scheduler=scheduler,
        bucket_plan=str(plan),
        record_steps=str(steps),
        **LIMITS,
    ) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        engine = llm.engine
    assert [len(answer.choices[0].token_ids) for answer in answers] == [6] * 6
    stats = engine.stats
    assert list(stats.by_bucket) == [(3, 3), (16, 2), (16, 4)], "the plan, cut to the engine's limits"
    assert stats.serving_compilations == 0
    trace = read_trace(steps)
    assert trace.num_steps == stats.steps > 6
    expectation = expect(planned_buckets(read_plan(plan), engine.config), trace.sizes, StepCost())
    for entry in expectation.buckets:
        came = stats.by_bucket[entry.bucket.tokens, entry.bucket.seqs]
        assert came.steps == round(entry.step_share * stats.steps)
        assert came.padding_rows == came.steps * entry.bucket.seqs - round(came.steps * entry.useful_rows)
        if (
            scheduler == "continuous"
        ):  # the static one computes padding of its own, which its trace counts as wanted
            useful = round(came.steps * entry.useful_tokens)
            assert came.padding_tokens == came.steps * entry.bucket.tokens - useful
    assert sum(came.steps for came in stats.by_bucket.values()) == stats.steps
    padding = sum(came.padding_tokens for came in stats.by_bucket.values())
    assert padding == stats.padded_tokens - stats.useful_tokens
    if scheduler == "continuous":
        assert expectation.packing_efficiency == pytest.approx(stats.packing_efficiency)


@pytest.mark.parametrize("option", ["bucket_plan", "record_steps"])
def test_a_plan_or_recording_that_cannot_be_is_refused_before_weights_are_read(
    tiny_checkpoint_dir: Path, tmp_path: Path, option: str
) -> None:
    small = plan_file(
        tmp_path, [{"tokens": 8, "seqs": [4]}]
    )  # too small; and, for the recorder, somebody's file
    seen: list[tuple[object, ...]] = []
    options = EngineConfig(**{option: str(small)}, **LIMITS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^[^\n]*(8 tokens and 4 sequences|plan\.json)[^\n]*$"):
        create_engine(tiny_checkpoint_dir, options, progress=lambda *event: seen.append(event))
    assert seen == []
