"""Where a step's time goes, on a tiny model: what is run and printed (never how fast)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.batch.buckets import default_buckets
from jaxserve.bench.__main__ import main
from jaxserve.bench.step import PARTS
from jaxserve.bench.step_batches import make_batches, requests_of
from jaxserve.config import EngineConfig, resolve
from jaxserve.errors import ConfigError
from jaxserve.workload.traced_request import TracedRequest
from tests.device.driver import MODEL

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ITEMS = tuple(TracedRequest(tuple(range(10, 10 + prompt)), 20) for prompt in (3, 21, 9))


def test_batches_are_those_of_the_real_scheduler() -> None:
    config = resolve(
        EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, block_size=8), MODEL, platform="cpu"
    )
    steps = make_batches(requests_of(ITEMS, config), config, default_buckets(config), 64)
    assert steps.prompts.num_tokens == 16
    decode = steps.decode.rows
    assert [row.num_scheduled_tokens for row in decode] == [1, 1, 1]
    assert all(
        row.num_computed_tokens > len(item.prompt_token_ids) for row, item in zip(decode, ITEMS, strict=True)
    )
    assert steps.host_seconds > 0


def test_requests_that_fill_the_context_are_refused() -> None:
    config = resolve(EngineConfig(max_model_len=48, max_num_seqs=4), MODEL, platform="cpu")
    with pytest.raises(
        ConfigError, match=r"request 1: 31 tokens, and 33 steps .* do not fit a context of 48"
    ):
        requests_of(ITEMS, config)


def test_every_part_of_every_shape(tiny_checkpoint_dir: Path, tmp_path: Path, capsys) -> None:
    workload, result = tmp_path / "w.json", tmp_path / "r.json"
    items = [{"prompt_token_ids": item.prompt_token_ids, "max_tokens": item.max_tokens} for item in ITEMS]
    workload.write_text(json.dumps(items))
    command = [
        "step",
        "--workload",
        str(workload),
        "--model",
        str(tiny_checkpoint_dir),
        "--json",
        str(result),
    ]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--repeats", "2", "--rows"]
    assert main([*command, "2", "3"]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    facts = json.loads(result.read_text())
    assert {"date", "commit", "machine", "versions", "config", "repeats"} <= set(facts)
    assert [(line["kind"], line["rows"]) for line in facts["milliseconds"]][:2] == [
        ("decode", 2),
        ("decode", 3),
    ]
    assert facts["milliseconds"][2]["kind"] == "prompts"
    assert all(set(line["parts"]) == set(PARTS) for line in facts["milliseconds"])
    assert len(table) == 2 + len(facts["milliseconds"])
    assert main([*command, "5"]) == 2
    assert "5 rows need as many requests and slots, but there are 3" in capsys.readouterr().err
