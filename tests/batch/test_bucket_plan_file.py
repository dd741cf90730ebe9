"""Plan files: what is written is read back, and no damage gets past the reader."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.bucket_expectation import expect
from jaxserve.batch.bucket_plan import Shapes, StepCost, best_plans
from jaxserve.batch.bucket_plan_file import read_plan, write_plan
from jaxserve.batch.buckets import ShapeBuckets, buckets_for, planned_buckets
from jaxserve.batch.step_sizes import StepLimits, typical_steps
from jaxserve.errors import ConfigError
from tests.fakes import make_config

LIMITS = StepLimits(100, 20)
SHAPES = best_plans(typical_steps(LIMITS), LIMITS, max_shapes=9).plan(9)


def written(path: Path, shapes: Shapes = SHAPES) -> Path:
    sizes = typical_steps(LIMITS)
    write_plan(path, shapes, expect(buckets_for(shapes, LIMITS), sizes, StepCost()), num_steps=1)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json")
    assert read_plan(path) == SHAPES
    assert read_plan(written(path)) == SHAPES, "written over"
    assert os.listdir(tmp_path) == ["plan.json"]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """A file that is cut, or in which any byte is changed, lost or doubled."""
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "plan.json")
        blob = path.read_bytes()
        at = data.draw(st.integers(0, len(blob) - 2))
        end = data.draw(st.sampled_from([at + 1, len(blob)]))
        path.write_bytes(blob[:at] + data.draw(st.binary(max_size=2)) + blob[end:])
        try:
            shapes = read_plan(path)
        except ConfigError as error:
            assert str(error).startswith(f"{path}: ")  # noqa: PT017 - refusing is one of two right answers
            return
        buckets = ShapeBuckets(shapes, blocks=1)
        most, rows = shapes[-1][0], shapes[-1][1][-1]
        assert all(bucket.tokens >= bucket.seqs >= 2 for bucket in buckets.all_buckets())
        for tokens in range(1, min(most, 300) + 1):
            buckets.smallest_for(tokens, min(tokens, rows))


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (None, "'shapes' must be a list"),
        ([], "'shapes' must be a list"),
        ({"4": [4]}, "'shapes' must be a list"),
        ([[4, [4]]], "size 0 must have exactly"),
        ([{"tokens": 4}], "size 0 must have exactly"),
        ([{"tokens": 4, "seqs": 4}], "a list of them"),
        ([{"tokens": "4", "seqs": [4]}], "whole number"),
        ([{"tokens": 4.0, "seqs": [4]}], "whole number"),
        ([{"tokens": True, "seqs": [2]}], "whole number"),
        ([{"tokens": 4, "seqs": []}], "must end with"),
        ([{"tokens": 1, "seqs": []}], "ascend from at least 2"),
        ([{"tokens": 4, "seqs": [1, 4]}], "ascend from at least 2"),
        ([{"tokens": 4, "seqs": [-2, 4]}], "ascend"),
        ([{"tokens": 4, "seqs": [4, 4]}], "ascend"),
        ([{"tokens": 4, "seqs": [8]}], "must end with 4"),
        ([{"tokens": 8, "seqs": [8]}, {"tokens": 4, "seqs": [4]}], "ascend"),
        ([{"tokens": 4, "seqs": [4]}, {"tokens": 4, "seqs": [4]}], "ascend"),
        ([{"tokens": 8, "seqs": [2]}, {"tokens": 16, "seqs": [6]}], "'seqs' of 8 tokens must end with 6"),
    ],
)
def test_shapes_that_leave_a_step_without_a_bucket_are_refused(
    tmp_path: Path, shapes: Any, says: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"jaxserve_bucket_plan": 1, "shapes": shapes}))
    assert says in refused(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "is not a bucket plan"),
        (b"{}", "is not a bucket plan"),
        (b'{"jaxserve_bucket_plan": 2}', "of version 2"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert says in refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "missing.json")
    refused(tmp_path)


@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(101, 20), (100, 21), (4000, 300)])
def test_a_plan_that_does_not_hold_the_largest_steps_is_refused(max_tokens: int, max_seqs: int) -> None:
    config = make_config(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs)
    with pytest.raises(ConfigError, match=f"100 tokens and 20 sequences.* {max_tokens} and {max_seqs}"):
        planned_buckets(SHAPES, config)


@given(max_tokens=st.integers(1, 100), data=st.data())
@settings(deadline=None)
def test_a_plan_for_more_than_an_engine_needs_is_cut_to_it(max_tokens: int, data: st.DataObject) -> None:
    max_seqs = data.draw(st.integers(1, min(20, max_tokens)))
    config = make_config(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, max_model_len=130)
    buckets = planned_buckets(SHAPES, config)
    used = set()
    for tokens in range(1, max_tokens + 1):
        for seqs in range(1, min(tokens, max_seqs) + 1):
            used.add(buckets.smallest_for(tokens, seqs))
    assert sorted(used, reverse=True) == buckets.all_buckets(), "all that is compiled is of use, once"
    largest = buckets.all_buckets()[0]
    assert (largest.tokens, largest.seqs) == (max(2, max_tokens), min(max(2, max_tokens), max(2, max_seqs)))
    assert largest.blocks == config.max_blocks_per_seq
