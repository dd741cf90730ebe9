"""The logic of scripts/gpu_check and scripts/tune_kernels: what can be tested of them without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pallas_kernels.paged_attention import H200, AttentionSpec, xla
from pallas_kernels.paged_attention.tuning import TuningConfig, find_config, read_table, shape_class
from scripts.gpu import attention_load, decode_step, plan, tune_main, worker
from scripts.gpu.correctness import check_outputs
from scripts.gpu.engine_tokens import Step, compare
from scripts.gpu.jobs import (
    DIED,
    FAILED,
    HUNG,
    LEFT_OUT,
    NOT_RUN,
    OK,
    REFUSED,
    WRONG,
    CheckFailedError,
    Job,
    Outcome,
)
from scripts.gpu.measure import median_seconds
from scripts.gpu.random_model import model_config, resolved_config
from scripts.gpu.report import Report, to_json, to_markdown
from scripts.gpu.supervisor import run_jobs
from scripts.gpu.tune import _tune_target, case_for
from scripts.gpu.tune_candidates import DECODE, FIELDS, PREFILL, SPLIT, Target, candidates, fastest, targets
from scripts.gpu.workplace import Workplace

REPOSITORY = Path(__file__).resolve().parents[2]


def script(name: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)  # it finds the repository by itself
    command = [sys.executable, str(REPOSITORY / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, cwd="/")


def test_the_whole_run_on_a_cpu(tmp_path: Path) -> None:
    result = script("gpu_check", "--cpu", "--minutes", "30", "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert not found["failures"]
    statuses = {o["name"]: o["status"] for o in found["outcomes"]}
    torch_status = OK if importlib.util.find_spec("torch") else LEFT_OUT
    for name, status in statuses.items():
        expected = REFUSED if "head_dim 320" in name else torch_status if name.startswith("torch") else OK
        assert status == expected, name
    kinds = Counter(o["case"]["kind"] for o in found["outcomes"])
    assert kinds == {
        **dict.fromkeys(("environment", "copy", "matmul", "time_decode", "time_prefill", "jax_decode"), 1),
        **dict.fromkeys(("jax_prefill", "torch_decode", "torch_prefill", "engine", "step", "host_gap"), 1),
        "attention": 5,
    }
    text = (tmp_path / "out/gpu_check.md").read_text()
    assert text.strip() == result.stdout.strip()
    assert "| pallas-triton | bfloat16 | 1 | 0 | 1 | 0 |" in text
    assert "not 320" in text, "refusals are listed with their reasons"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = script("gpu_check", "--out", str(tmp_path))
    assert result.returncode == 2
    assert (
        result.stderr.strip().splitlines()[-1]
        == "error: no GPU is here, jax finds cpu; --cpu tests the logic"
    )


def supervise(tmp_path: Path, *hows: str, budget_s: float = 60, **limits: Any) -> list[Outcome]:
    cases = [{"name": f"{i} {how}", "kind": "selftest", "how": how} for i, how in enumerate(hows)]
    job = Job("selftest", "correctness", cases, budget_s=budget_s, is_check=True, **limits)
    told: list[str] = []
    outcomes = run_jobs(
        [job],
        cpu=True,
        work=tmp_path / "work",
        deadline=time.monotonic() + 100,
        at_once=1,
        done=lambda job, outcomes: told.append(job.name),
    )
    assert told == ["selftest"]
    assert [o.name for o in outcomes] == [case["name"] for case in cases]
    return outcomes


def test_a_crash_costs_its_own_case_only(tmp_path: Path) -> None:
    hows = ("not", "crash", "not", "device error", "not", "wrong", "refuse", "package")
    outcomes = supervise(tmp_path, *hows)
    expected = [OK, DIED, OK, FAILED, OK, WRONG, REFUSED, LEFT_OUT]
    assert [o.status for o in outcomes] == expected
    assert [o.fails_the_run for o in outcomes] == [s in (DIED, FAILED, WRONG) for s in expected]
    assert "SIGABRT" in outcomes[1].note
    assert "ILLEGAL_ADDRESS" in outcomes[3].note


def test_a_hang_is_ended_and_the_rest_runs(tmp_path: Path) -> None:
    outcomes = supervise(tmp_path, "not", "hang", "not", stall_s=3)
    assert [o.status for o in outcomes] == [OK, HUNG, OK]


def test_a_job_ends_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes = supervise(tmp_path, "not", "hang", "not", budget_s=8)
    assert time.monotonic() - started < 20
    assert [o.status for o in outcomes] == [OK, NOT_RUN, NOT_RUN]
    assert not any(o.fails_the_run for o in outcomes), "no time is no proof of an error"


def test_a_worker_that_cannot_begin_fails_every_case(tmp_path: Path) -> None:
    outcomes = supervise(tmp_path, "not", "not", "not", environment={"PYTHONHOME": "/nowhere"})
    assert [o.status for o in outcomes] == [DIED] * 3
    assert "ended with code 1; last words: " in outcomes[2].note


def outcome(status: str, backend: str = "pallas-triton", **more: object) -> Outcome:
    fields = {"is_check": True, **more}
    case = {"name": f"{backend} case", "kind": "attention", "backend": backend, "dtype": "bfloat16"}
    return Outcome(
        "correctness", "job", case, status, {"error": 1e-3} if status == OK else {}, "why", **fields
    )


@pytest.mark.parametrize(
    ("outcomes", "failures"),
    [
        ([outcome(OK), outcome(REFUSED)], 0),
        ([outcome(OK), outcome(WRONG)], 1),
        ([outcome(OK), outcome(DIED)], 1),
        ([outcome(OK), outcome(FAILED, is_check=False)], 0),
        ([outcome(OK), outcome(WRONG, is_check=False)], 1),
        ([outcome(REFUSED), outcome(REFUSED)], 1),  # a backend that refuses everything has not been checked
        ([outcome(OK), outcome(REFUSED, backend="xla")], 1),
    ],
)
def test_what_fails_a_run(outcomes: list[Outcome], failures: int) -> None:
    report = Report("gpu_check", outcomes)
    assert len(report.failures()) == failures
    assert len(to_json(report)["failures"]) == failures
    assert (f"{failures} failures" in to_markdown(report)) == bool(failures)


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every correctness case of the plan goes through these functions; here they judge a backend with a planted bug."""
    shape = {"group": 2, "kv_heads": 1, "head_dim": 8, "block_size": 8, "dtype": "float32", "backend": "xla"}
    lens = {"contexts": [20, 3, 0], "query_lens": [1, 1, 4], "padding": 1}
    place = Workplace(cpu=True)
    case = {"name": "x", "kind": "attention", **shape, **lens}
    assert worker.run_case(case, place)["status"] == OK
    right = xla._attend_window

    def with_planted_bug(context, *rest):
        return right(dataclasses.replace(context, scale=context.scale * 1.001), *rest)

    monkeypatch.setattr(xla, "_attend_window", with_planted_bug)
    for kind in ("attention", "decode"):
        # Another shape than above: programs are kept by shape.
        other = {
            **case,
            "kind": kind,
            "head_dim": 16,
            "query_lens": [1, 1, 1] if kind == "decode" else [1, 1, 4],
        }
        result = worker.run_case(other, place)
        assert result["status"] == WRONG, kind
        assert "relative error" in result["note"]


def test_outputs_are_judged() -> None:
    truth = np.ones((2, 3))
    assert check_outputs([truth + 1e-6, truth + 1e-6], truth, "float32") == pytest.approx(1e-6)
    for outputs in ([truth + 1e-5], [truth * np.nan], [truth, truth + 1e-7]):
        with pytest.raises(CheckFailedError):
            check_outputs(outputs, truth, "float32")


def test_near_ties_end_a_comparison_and_other_differences_fail_it() -> None:
    theirs = [Step(1, -0.1, 2.0), Step(2, -0.7, 1e-5), Step(3, -0.2, 1.0)]
    assert compare(theirs, theirs, 1e-4, 1e-3) == (3, 0.0)
    swapped = [theirs[0], Step(9, -0.7, 1e-5), Step(8, -3.0, 4.0)]
    assert compare(swapped, theirs, 1e-4, 1e-3) == (1, 0.0)
    for wrong in (
        [Step(9, -0.1, 2.0), *theirs[1:]],
        [Step(1, -0.2, 2.0), *theirs[1:]],
        [Step(1, float("nan"), 2.0), *theirs[1:]],
        theirs[:2],
    ):
        with pytest.raises(CheckFailedError):
            compare(wrong, theirs, 1e-4, 1e-3)


def test_the_plan_asks_for_everything() -> None:
    jobs = [*plan.check_jobs(cpu=False), *plan.speed_jobs(cpu=False), *plan.check_jobs(cpu=True)]
    for job in jobs:
        names = [case["name"] for case in job.cases]
        assert len(set(names)) == len(names), "outcomes are kept by name"
        json.dumps(job.cases)
        for case in job.cases:
            module, _, function = worker._KINDS[case["kind"]].partition(":")
            assert callable(getattr(importlib.import_module(module), function))
    for backend in plan.BACKENDS:
        cases = [c for c in plan.attention_cases(backend) if c["kind"] == "attention"]
        asked = lambda *keys: {tuple(c.get(key) for key in keys) for c in cases}  # noqa: B023, E731
        assert {(d, g) for d in (64, 128) for g in plan.GROUPS} <= asked("head_dim", "group")
        dtypes = ("float32", "bfloat16", "float16")
        assert {(d, t) for d in plan.HEAD_DIMS for t in dtypes} <= asked("head_dim", "dtype")
        assert {(b,) for b in (8, 16, 32, 64, 128)} <= asked("block_size")
        kinds = [(t, s) for t in ("int8", "float8_e4m3fn", "float8_e5m2") for s in ("block", "head", "both")]
        assert set(kinds) <= asked("kv_dtype", "scales")
    timed = {
        (c["backend"], c["kind"])
        for job in jobs
        for c in job.cases
        if job.section == "speed" and "kv_dtype" in c
    }
    assert timed == {(b, kind) for b in plan.PALLAS for kind in ("time_decode", "time_prefill")}


def test_speed_cases_fit_their_pools() -> None:
    for job in plan.speed_jobs(cpu=False):
        for case in job.cases:
            if case["kind"] not in ("time_decode", "time_prefill"):
                continue
            rows = case["tokens"] // case["chunk"] if "chunk" in case else case["batch"]
            context = case["context"] + case.get("chunk", 0)
            assert rows * context <= case["pool_tokens"]
            assert context <= case["width"] * case["block_size"]


def test_loads_count_what_they_move() -> None:
    case = {"group": 2, "kv_heads": 3, "head_dim": 8, "block_size": 4, "dtype": "float32", "pool_tokens": 400}
    spec, pool = attention_load.spec_of(case), attention_load.pool_for(case, Workplace(cpu=True))
    assert pool.k_cache_NKbd.shape == (100, 3, 4, 8)
    load = attention_load.decode_load(spec, pool, [5, 9], rows=3, width=6, launches=2)
    assert load.bytes_read == (5 + 9) * 2 * 3 * 8 * 4
    assert load.flops == (5 + 9) * 6 * 8 * 2 * 2
    used = [block for table in load.tables_LSB for row in np.asarray(table) for block in row if block]
    assert len(set(used)) == len(used), "no block is read twice"
    chunks = attention_load.prefill_load(spec, pool, 4, 10, tokens=9, rows=3, width=6, launches=1)
    assert chunks.num_seqs == 2
    assert chunks.cu_q_lens.tolist() == [0, 4, 8, 8]
    assert chunks.flops == 2 * (11 + 12 + 13 + 14) * 6 * 8 * 2 * 2


def test_the_step_that_is_timed_is_the_one_that_the_builder_would_pack() -> None:
    from jaxserve.batch.bucket import Bucket
    from jaxserve.batch.buckets import ShapeBuckets
    from jaxserve.batch.builder import BatchBuilder
    from jaxserve.batch.layout import places, unpack
    from jaxserve.request import Request, SamplingParams
    from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput

    model = model_config(plan.TINY)
    config = resolved_config(
        model, dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=3, block_size=16
    )
    bucket = Bucket(3, 3, config.max_blocks_per_seq)
    packed = decode_step._decode_batch(bucket, 37, config, model)
    ours = unpack(packed, places(bucket))
    scheduled = []
    for row in range(3):
        prompt = (0,) * 36 + (int(ours["token_ids"][row]),)
        params = SamplingParams(temperature=0.0)
        request = Request(f"{row}:0", str(row), 0, prompt, params, seed=0, max_tokens=1, slot=row)
        blocks = tuple(int(block) for block in ours["block_tables"][row, :3])
        scheduled.append(ScheduledRequest(request, 36, 1, row, blocks, True, is_new=True))
    buckets = ShapeBuckets(((3, (3,)),), bucket.blocks)
    builder = BatchBuilder(buckets, block_size=16, padding_row=3)
    batch = builder.build(SchedulerOutput(0, tuple(scheduled)))
    theirs = unpack(batch.packed, places(bucket))
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_medians_are_of_one_launch() -> None:
    calls = []

    def call() -> None:
        calls.append(time.sleep(0.02))

    taken = median_seconds(call, lambda result: result, launches=4)
    assert 0.005 <= taken["least"] <= taken["seconds"] <= taken["most"]
    assert taken["seconds"] < 0.02


# Tuning.

TARGET = Target("pallas-triton", 128, "bfloat16", "bfloat16")


def base_of(target: Target) -> TuningConfig:
    spec = AttentionSpec(4, 1, target.head_dim, 16, target.dtype, target.kv_dtype)
    return find_config(target.backend, shape_class(spec, H200))


@pytest.mark.parametrize("target", targets(), ids=str)
def test_candidates_can_run(target: Target) -> None:
    base = base_of(target)
    for part in (DECODE, SPLIT, PREFILL):
        tried = candidates(target, part, base)
        assert tried[0] == base
        assert len(set(tried)) == len(tried) > 1
        for config in tried[1:]:
            assert config.split_tokens % config.decode_block_k == 0
            json.dumps(case_for(target, part, config, cpu=False))
        assert all(untouched(part, config) == untouched(part, base) for config in tried)


def untouched(part: str, config: TuningConfig) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in FIELDS[part]}


class FakeRunner:
    """Measures by a rule; every third candidate dies."""

    cpu = True

    def __init__(self, shape: dict) -> None:
        self.shape = shape
        self.tried: list[dict] = []

    def measure(self, name: str, cases: list[dict]) -> list[Outcome]:
        outcomes = []
        for i, case in enumerate(cases):
            if case["config"] is None:
                data = {"shape": self.shape, "base": dataclasses.asdict(base_of(TARGET))}
                outcomes.append(Outcome("tuning", name, case, OK, data))
            elif i % 3 == 1:
                outcomes.append(Outcome("tuning", name, case, DIED, note="too large"))
            else:
                self.tried.append(case["config"])
                outcomes.append(Outcome("tuning", name, case, OK, {"score": self.score(case["config"])}))
        return outcomes

    @staticmethod
    def score(config: dict) -> float:
        return 1.0 + sum(config[key] for key in ("decode_warps", "split_tokens", "prefill_block_k")) / 1000


def test_tuning_keeps_the_fastest_and_writes_where_it_came_from(tmp_path: Path) -> None:
    shape = {"compute_capability": "9.0", "head_dim": 128, "kv_bytes": 2}
    runner = FakeRunner(shape)
    table = tmp_path / "table.json"
    line = _tune_target(TARGET, runner, table, "measured on H200, 2026-01-01", few=False)  # type: ignore[arg-type]
    rows = read_table(table)
    assert len(rows) == len(read_table()) + 1, "rows of other classes stay"
    (config,) = [c for name, key, c in rows if name == TARGET.backend and dataclasses.asdict(key) == shape]
    assert config.source == "measured on H200, 2026-01-01"
    best = min(runner.tried, key=runner.score)
    for key in ("decode_warps", "prefill_block_k"):
        assert getattr(config, key) == min(tried[key] for tried in runner.tried)
    assert config.split_tokens == best["split_tokens"]
    assert "ran" in line
    again = _tune_target(TARGET, FakeRunner(shape), table, "measured later", few=False)  # type: ignore[arg-type]
    assert again
    assert len(read_table(table)) == len(rows), "a measured row is replaced"


def test_a_candidate_is_checked_before_it_is_timed() -> None:
    assert fastest({base_of(TARGET): 1.0}) == base_of(TARGET)
    bad = {**case_for(TARGET, DECODE, base_of(TARGET), cpu=True)}
    bad["check"] = {**bad["check"], "head_dim": 320}
    assert worker.run_case(bad, Workplace(cpu=True))["status"] == REFUSED


def test_tune_kernels_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_main.main(["--dry-run", "--only", "head_dim 7"]) == 2
    assert "no target matches" in capsys.readouterr().err
    assert tune_main.main(["--dry-run", "--only", str(TARGET)]) == 0
    assert f"{TARGET}: prefill: " in capsys.readouterr().out
    refused = script("tune_kernels")
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "needs a GPU" in refused.stderr
