"""The cost of deterministic mode, on a tiny model: what is run and printed (never how fast)."""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.bench.deterministic import measure_cost, report, to_json
from jaxserve.config import EngineConfig
from jaxserve.workload.traced_request import TracedRequest, Workload

WORKLOAD = Workload("tiny", tuple(TracedRequest(tuple(range(10, 10 + prompt)), 5) for prompt in (3, 21, 9)))


def test_both_modes_run_the_same_workload(tiny_checkpoint_dir: Path) -> None:
    options = EngineConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    announced: list[str] = []
    cost = measure_cost(str(tiny_checkpoint_dir), WORKLOAD, options, repeats=2, announce=announced.append)
    passes = [line.split(":")[0] for line in announced if line.startswith("pass")]
    assert [name.split()[-1] for name in passes] == ["default", "deterministic", "deterministic", "default"]
    assert cost.config.deterministic
    assert cost.equal == 3
    assert all(run.steps == cost.default[0].steps for run in (*cost.default, *cost.deterministic))
    assert report(cost).splitlines()[-1] == f"ratio={cost.ratio:.3f}"
    facts = json.loads(json.dumps(to_json(cost)))
    assert {"date", "commit", "machine", "config", "seconds", "ratio"} <= set(facts)
    assert facts["config"]["deterministic"]
