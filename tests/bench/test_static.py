"""The comparison with static batching, on a tiny model: what is counted, checked and printed (never how fast)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxserve.bench.agreement import Difference, find_differences
from jaxserve.bench.measure import run_workload
from jaxserve.bench.static import Comparison, ample_blocks, compare, report, static_options, to_json
from jaxserve.config import EngineConfig, replace
from jaxserve.engine_factory import create_engine
from jaxserve.workload.traced_request import TracedRequest, Workload

pytestmark = pytest.mark.usefixtures("quick_to_compile")

OPTIONS = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=128)
# The long one comes with the short ones: static batching pads them to it.
WORKLOAD = Workload(
    "tiny",
    tuple(
        TracedRequest(tuple(range(10, 10 + prompt)), out)
        for prompt, out in ((3, 2), (40, 9), (5, 1), (2, 12))
    ),
)


@pytest.fixture(scope="module")
def comparison(tiny_checkpoint_dir: Path) -> Comparison:
    return compare(str(tiny_checkpoint_dir), WORKLOAD, OPTIONS, repeats=2)


def test_both_engines_give_the_same_tokens(comparison: Comparison) -> None:
    assert len(comparison.continuous) == len(comparison.static) == 2
    assert comparison.real_differences == ()
    for run in (*comparison.continuous, *comparison.static):
        assert [len(tokens) for tokens in run.token_ids] == [item.max_tokens for item in WORKLOAD.requests]


def test_what_is_counted_adds_up(comparison: Comparison) -> None:
    # The last token of an output is sampled but never computed.
    useful = sum(len(item.prompt_token_ids) + item.max_tokens - 1 for item in WORKLOAD.requests)
    for run in (*comparison.continuous, *comparison.static):
        assert run.useful_tokens == useful <= run.padded_tokens
        assert 0 < run.slot_utilisation <= 1
        assert run.compilations == 0
        assert run.seconds >= max(run.finished)
        assert all(0 < first <= last for first, last in zip(run.first_token, run.finished, strict=True))


def test_static_batching_computes_its_padding(comparison: Comparison) -> None:
    # Batches of two in order of arrival: (3, 40) and (5, 2) prompt tokens; (2, 9) and (1, 12) output tokens.
    least = 2 * (40 + 9 - 1) + 2 * (5 + 12 - 1)
    assert comparison.static[0].padded_tokens >= least
    assert comparison.static[0].packing_efficiency < comparison.continuous[0].packing_efficiency


def test_the_two_differ_in_the_scheduler_alone(comparison: Comparison) -> None:
    assert comparison.static_config == dataclasses.replace(comparison.continuous_config, scheduler="static")
    assert not comparison.continuous_config.enable_prefix_caching
    assert all(run.preemptions == 0 for run in (*comparison.continuous, *comparison.static))


def test_the_report_ends_with_the_ratio(comparison: Comparison) -> None:
    lines = report(comparison).splitlines()
    assert lines[-1] == f"ratio={comparison.ratio:.2f}"
    assert any(line.startswith("static baseline") for line in lines)


def test_the_result_is_json_with_machine_and_versions(comparison: Comparison) -> None:
    result = json.loads(json.dumps(to_json(comparison)))
    assert result["ratio"] == pytest.approx(comparison.ratio, abs=1e-4)
    assert {"date", "commit", "versions", "machine", "device", "config", "runs"} <= set(result)


def test_a_difference_is_found_where_it_begins_and_excused_only_by_a_near_tie(
    comparison: Comparison, tiny_checkpoint_dir: Path
) -> None:
    right = list(comparison.continuous[0].token_ids)
    wrong = list(right)
    wrong[1] = (*right[1][:4], right[1][4] + 1, *right[1][5:])
    engine = create_engine(str(tiny_checkpoint_dir), replace(OPTIONS, num_blocks=3))
    try:
        assert find_differences(engine, WORKLOAD, right, right) == []
        (found,) = find_differences(engine, WORKLOAD, right, wrong)
    finally:
        engine.close()
    assert (found.request, found.position) == (1, 4)
    assert found.margin > 0
    near = Difference(1, 4, comparison.near_tie / 2)
    far = Difference(1, 4, comparison.near_tie * 2)
    changed = dataclasses.replace(comparison, differences=(near, far))
    assert changed.real_differences == (far,)
    assert "ERROR" in report(changed)
    assert "ERROR" not in report(dataclasses.replace(comparison, differences=(near,)))


def test_a_request_that_does_not_fit_is_refused(tiny_checkpoint_dir: Path) -> None:
    engine = create_engine(str(tiny_checkpoint_dir), replace(OPTIONS, num_blocks=3))
    try:
        with pytest.raises(ValueError, match="holds 96 tokens"):
            run_workload(engine, Workload("long", (TracedRequest((1,) * 127, 2),)))
    finally:
        engine.close()


def test_the_batch_size_of_static_changes_nothing_else() -> None:
    common = EngineConfig(max_num_seqs=4, enable_prefix_caching=False)
    same = static_options(common, None)
    assert same == dataclasses.replace(common, scheduler="static")
    assert static_options(common, 2) == dataclasses.replace(same, max_num_seqs=2)


def test_the_pool_holds_the_longest_requests_that_run_at_once() -> None:
    # Blocks of 8 for 5, 49, 6 and 14 tokens: 1, 7, 1 and 2.
    assert ample_blocks(WORKLOAD, EngineConfig(block_size=8, max_num_seqs=2)) == 9
    assert ample_blocks(WORKLOAD, EngineConfig(block_size=8, max_num_seqs=9)) == 11
    assert ample_blocks(WORKLOAD, EngineConfig(block_size=8)) == 11
