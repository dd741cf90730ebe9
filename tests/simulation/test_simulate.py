"""Simulated time is that of the cost model; who gets it is decided by the scheduler that serves."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.batch.buckets import default_buckets
from jaxserve.cli.main import run
from jaxserve.config import GenerationDefaults
from jaxserve.device.kv_cache import block_bytes
from jaxserve.errors import ConfigError
from jaxserve.recording.costs_file import EngineCosts, read_costs, write_costs
from jaxserve.recording.engine_description import EngineDescription
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.step_time import StepTimeModel, StepWork
from jaxserve.simulation.latencies import summarise
from jaxserve.simulation.simulate import Variation, simulate_workload
from jaxserve.workload.arrivals import Arrivals, Lengths
from jaxserve.workload.generator import WorkloadSpec, generate
from jaxserve.workload.traced_request import TracedRequest, Workload
from jaxserve.workload.workload_file import write_workload
from tests.engine_harness import TINY_MODEL
from tests.fakes import make_config

STEP_SECONDS, TOKEN_SECONDS = 0.02, 0.001


def make_costs(num_blocks: int = 400, spread: float = 0.0, **changes: Any) -> EngineCosts:
    """Of an engine whose steps take 20 ms and 1 ms a padded token."""
    config = make_config(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, **changes)
    buckets = default_buckets(config)
    shapes = tuple(sorted((b.tokens, b.seqs) for b in buckets.all_buckets()))
    rng = random.Random(0)

    def round_up(tokens: int, seqs: int) -> tuple[int, int]:
        bucket = buckets.smallest_for(tokens, seqs)
        return bucket.tokens, bucket.seqs

    model = StepTimeModel(round_up)
    for _ in range(600):
        work = StepWork(rng.randint(8, 64), rng.randint(1, 8), rng.randint(1, 900), rng.randint(1, 5000))
        seconds = STEP_SECONDS + TOKEN_SECONDS * round_up(work.tokens, work.seqs)[0]
        model.observe(work, seconds * rng.uniform(1 - spread, 1 + spread))
    host = HostSpace(0, block_bytes(TINY_MODEL, config.block_size, jnp.dtype(config.dtype)))
    description = EngineDescription(
        "hand", config, TINY_MODEL, GenerationDefaults((2,)), num_blocks, host, shapes, {}
    )
    return EngineCosts(description, model.to_dict())


def prompt(length: int, key: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(key).randrange(100, 40_000) for _ in range(length))


def test_a_lone_request_takes_what_its_steps_take() -> None:
    costs = make_costs()
    (t, _), *_ = costs.engine.shapes  # the smallest, which a single decode runs in
    result = simulate_workload(costs, Workload("w", (TracedRequest(prompt(64), 11, arrival=5.0),)))
    [times] = result.drive.requests
    assert times.ttft == pytest.approx(STEP_SECONDS + 64 * TOKEN_SECONDS, rel=0.03)
    assert times.tpot == pytest.approx(STEP_SECONDS + t * TOKEN_SECONDS, rel=0.03)
    assert times.e2e == pytest.approx(times.ttft + 10 * times.tpot)
    assert result.drive.steps == 11
    assert result.drive.seconds == pytest.approx(5 + times.e2e)
    assert result.wall_seconds < 5


def test_who_waits_waits_for_the_steps_of_others() -> None:
    costs = make_costs()
    requests = tuple(TracedRequest(prompt(60, key), 40) for key in range(20))
    times = simulate_workload(costs, Workload("w", requests)).drive.requests
    ttfts = [entry.ttft for entry in times]
    assert all(ttft is not None for ttft in ttfts)
    first, ninth, last = ttfts[0], ttfts[8], ttfts[19]
    assert first < 0.1 < ninth < last  # type: ignore[operator]
    assert ninth >= 39 * STEP_SECONDS  # type: ignore[operator]


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_ends_and_nothing_is_left(overlap: bool) -> None:
    spec = WorkloadSpec(
        num_requests=150,
        arrivals=Arrivals(8.0, burstiness=2.0),
        prompt=Lengths(40, 0.8),
        output=Lengths(12, 0.8),
        context=300,
        background_share=0.3,
        chat_share=0.5,
        targets=ServiceTargets(0.5),
        n_share=0.1,
        stop_share=0.1,
        abort_share=0.1,
        abort_seconds=0.3,
    )
    workload = generate(spec, 1)
    costs = make_costs(num_blocks=130, overlap=overlap, max_waiting=20, spread=0.2)
    result = simulate_workload(costs, workload)
    summary = summarise(result.drive)
    assert summary.total.num_requests == 150
    gone = sum(r.aborts_after is not None for r in workload.requests)
    assert 150 - gone - sum(summary.total.refused.values()) <= summary.total.complete <= 150
    assert summary.by_class["interactive"].num_requests + summary.by_class["background"].num_requests == 150
    assert 0 < summary.total.within_targets <= summary.total.complete
    for entry in result.drive.requests:
        assert entry.finished is not None
        if entry.is_complete:
            assert [choice.num_tokens for choice in entry.choices] == [
                entry.request.max_tokens
            ] * entry.request.n
    assert summary.total.ttft[50] <= summary.total.ttft[90] <= summary.total.ttft[99]
    again = summarise(simulate_workload(costs, workload).drive)
    assert again == summary
    assert summarise(simulate_workload(costs, workload, seed=1).drive).total.ttft != summary.total.ttft


def test_shared_prefixes_are_computed_once() -> None:
    costs = make_costs()
    shared = tuple(TracedRequest(prompt(200), 4, arrival=2.0 * i) for i in range(5))
    others = tuple(TracedRequest(prompt(200, i), 4, arrival=2.0 * i) for i in range(5))
    hit, missed = (
        simulate_workload(costs, Workload("w", rs)).drive.requests[-1].ttft for rs in (shared, others)
    )
    assert hit is not None
    assert missed is not None
    assert hit < missed / 2


def test_less_memory_preempts_and_takes_longer() -> None:
    costs = make_costs()
    workload = Workload("w", tuple(TracedRequest(prompt(40, key), 60) for key in range(8)))
    ample = simulate_workload(costs, workload).drive
    cramped = simulate_workload(costs, workload, Variation(num_blocks=100)).drive
    assert ample.preemptions == 0 < cramped.preemptions
    assert cramped.seconds > ample.seconds
    assert all(entry.is_complete for entry in cramped.requests)
    static = simulate_workload(costs, workload, Variation(scheduler="static", max_num_seqs=4)).drive
    assert static.seconds > ample.seconds


@pytest.mark.parametrize(
    "variation",
    [Variation(max_num_seqs=9), Variation(max_num_batched_tokens=65), Variation(max_num_batched_tokens=7)],
)
def test_what_has_not_been_measured_is_refused(variation: Variation) -> None:
    with pytest.raises(ConfigError):
        simulate_workload(make_costs(), Workload("w", (TracedRequest((5,), 1),)), variation)


def test_goodput_counts_those_within_their_targets() -> None:
    costs = make_costs()
    background = TracedRequest(prompt(30), 5, service_class=ServiceClass.BACKGROUND)
    fast = dataclasses.replace(background, targets=ServiceTargets(10.0, 1.0))
    late = dataclasses.replace(background, targets=ServiceTargets(1e-4))
    slow = dataclasses.replace(background, targets=ServiceTargets(None, 1e-4))
    drive = simulate_workload(costs, Workload("w", (background, fast, late, slow))).drive
    assert [entry.meets_targets for entry in drive.requests] == [True, True, False, False]
    summary = summarise(drive)
    assert summary.total.goodput == pytest.approx(2 / drive.seconds)
    assert list(summary.by_class) == ["background"]


def test_the_command_prints_what_came_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, trace, facts = tmp_path / "costs.json", tmp_path / "trace.jsonl", tmp_path / "facts.json"
    plot = tmp_path / "plot.png"
    made = make_costs(spread=0.1)
    write_costs(costs, made)
    assert read_costs(costs) == made
    write_workload(trace, generate(WorkloadSpec(num_requests=30, context=300, background_share=0.4), 2))
    flags = ["simulate", "--trace", str(trace), "--costs", str(costs)]
    assert run([*flags, "--json", str(facts), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"all TTFT +[\d.]+ m?s", out)
    assert re.search(r"simulated in [\d.]+ s, [\d,]+ times as fast", out)
    assert "background: " in out
    assert json.loads(facts.read_text())["total"]["num_requests"] == 30
    assert plot.stat().st_size > 5000
    assert run([*flags, "--limit", "5", "--faster", "2", "--num-blocks", "150"]) == 0
    assert "5 requests in" in capsys.readouterr().out
    for bad in (
        ["--faster", "0"],
        ["--max-num-seqs", "100"],
        ["--costs", str(trace)],
        ["--trace", str(costs)],
    ):
        assert run([*flags, *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda c: c.update(jaxserve_costs=7), "version 7"),
        (lambda c: c.pop("jaxserve_costs"), "no file of step costs"),
        (lambda c: c["engine"].update(num_blocks="x"), "num_blocks"),
        (lambda c: c["engine"]["config"].pop("block_size"), "block_size"),
        (lambda c: c["step_times"].update(weights=[1.0]), "weights"),
        (lambda c: c["step_times"].pop("factors"), "factors"),
        (lambda c: c["step_times"].update(num_steps=2), "too few"),
    ],
)
def test_a_damaged_file_of_costs_is_one_line(tmp_path: Path, damage: Any, mentions: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs())
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_costs(path)
    assert str(path) in str(error.value)
    assert mentions in str(error.value)


def crowded(count: int = 30) -> Workload:
    """More than the pool holds at once, so that running requests lose their blocks."""
    return Workload(
        "w", tuple(TracedRequest(prompt(60, key), 60, arrival=0.01 * key) for key in range(count))
    )


def test_swapped_blocks_take_the_time_that_moving_them_takes() -> None:
    """A fast link is used and pays; a slow one is not used, once it has been measured."""
    costs = make_costs(num_blocks=60)
    without = simulate_workload(costs, crowded())
    assert without.drive.preemptions > 0
    assert without.swap.blocks == 0
    fast = simulate_workload(costs, crowded(), Variation(host_memory=2**30, transfer_rate=1e12))
    assert fast.swap.blocks > 0
    assert min(fast.swap.out_blocks, fast.swap.in_blocks, fast.swap.preemptions) > 0
    assert fast.drive.seconds < without.drive.seconds
    slow = simulate_workload(costs, crowded(), Variation(host_memory=2**30, transfer_rate=1e3))
    assert slow.swap.in_blocks < fast.swap.in_blocks / 4
    again = simulate_workload(costs, crowded(), Variation(host_memory=2**30, transfer_rate=1e12))
    assert again.drive == fast.drive


def test_rates_come_from_the_costs_and_every_moved_block_counts() -> None:
    costs = dataclasses.replace(make_costs(num_blocks=60), transfer_rates=(2e6, 5e6))
    result = simulate_workload(costs, crowded(), Variation(host_memory=2**30))
    assert result.swap.out_bytes_per_second == pytest.approx(2e6)
    assert result.swap.in_bytes_per_second == pytest.approx(5e6)
    free = simulate_workload(costs, crowded(), Variation(host_memory=2**30, transfer_rate=1e15))
    moved = free.swap.block_bytes * (result.swap.out_blocks / 2e6 + result.swap.in_blocks / 5e6)
    assert moved > 0
    assert result.drive.seconds > free.drive.seconds


def test_host_memory_without_known_rates_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="transfer rate"):
        simulate_workload(make_costs(), crowded(2), Variation(host_memory=2**30))
    with pytest.raises(ConfigError, match="holds no KV block"):
        simulate_workload(make_costs(), crowded(2), Variation(host_memory=1, transfer_rate=1e9))
    write_costs(tmp_path / "costs.json", make_costs(num_blocks=60))
    write_workload(tmp_path / "w.jsonl", crowded())
    command = ["simulate", "--trace", str(tmp_path / "w.jsonl"), "--costs", str(tmp_path / "costs.json")]
    assert run([*command, "--host-memory", "1000000000", "--transfer-rate", "0"]) == 2
    assert "--transfer-rate" in capsys.readouterr().err
    assert run([*command, "--host-memory", "1000000000", "--transfer-rate", "1e12"]) == 0
    assert "preemptions by swap" in capsys.readouterr().out
