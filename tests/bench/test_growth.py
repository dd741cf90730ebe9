"""How a step's time grows, on a tiny model: what is run and written (never how fast)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.batch.buckets import default_buckets
from jaxserve.bench.__main__ import main
from jaxserve.bench.costs import decode_step
from jaxserve.bench.growth import CONTEXT, QUEUE, SEQUENCES
from jaxserve.bench.machine_rates import MachineRates
from jaxserve.bench.step_batches import make_batches, requests_of
from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig, resolve
from jaxserve.workload.traced_request import TracedRequest
from tests.device.driver import MODEL

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def test_the_floor_is_the_slower_of_reading_and_computing() -> None:
    rates = MachineRates(bytes_per_second=100.0, flops_per_second=10.0)
    assert rates.floor(num_bytes=200, flops=10) == 2.0
    assert rates.floor(num_bytes=200, flops=50) == 5.0


def test_matrices_are_counted_as_the_checkpoint_holds_them(tiny_checkpoint_dir: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint_dir)
    matrices = [spec.shape for spec in checkpoint.weights.specs if len(spec.shape) == 2]
    held = sum(rows * columns for rows, columns in matrices)
    if not checkpoint.config.tie_word_embeddings:
        held -= checkpoint.config.vocab_size * checkpoint.config.hidden_size  # rows of it are looked up
    assert decode_step(checkpoint.config, batch=3, context=0).flops == 2 * 3 * held
    attention = 4 * checkpoint.config.num_layers * checkpoint.config.num_heads * checkpoint.config.head_dim
    assert decode_step(checkpoint.config, batch=3, context=5).flops == 2 * 3 * held + 3 * 5 * attention


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_are_counted_as_they_are_loaded(tiny_checkpoint_dir: Path, quantization) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint_dir)
    assert checkpoint.config.tie_word_embeddings
    cost = decode_step(checkpoint.config, batch=3, context=5, itemsize=4, quantization=quantization)
    assert cost.weight_bytes == checkpoint.param_bytes("float32", quantization=quantization)


def test_a_queue_waits_behind_the_running_and_changes_nothing_else() -> None:
    options = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, block_size=8)
    config = resolve(options, MODEL, platform="cpu")
    items = tuple(TracedRequest(tuple(range(start, start + 9)), 1) for start in (10, 30, 50))
    alone, queued = (
        make_batches(requests_of(items, config), config, default_buckets(config), 64, waiting=waiting).decode
        for waiting in (0, 50)
    )
    assert [row.request_id for row in queued.rows] == [row.request_id for row in alone.rows]
    assert queued.bucket == alone.bucket


def test_every_point_of_every_sweep(tiny_checkpoint_dir: Path, tmp_path: Path, capsys) -> None:
    result, picture = tmp_path / "r.json", tmp_path / "g.svg"
    command = ["growth", "--model", str(tiny_checkpoint_dir), "--json", str(result), "--plot", str(picture)]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--repeats", "2"]
    command += ["--sequences", "3", "1", "--contexts", "8", "20", "--queues", "0", "30"]
    assert main([*command, "--at-sequences", "2", "--at-context", "12"]) == 0
    table = capsys.readouterr().out.strip().splitlines()
    facts = json.loads(result.read_text())
    assert {"date", "commit", "machine", "versions", "config", "rates", "repeats"} <= set(facts)
    loads = [
        (point["sweep"], point["sequences"], point["context"], point["waiting"])
        for point in facts["milliseconds"]
    ]
    assert loads == [
        (SEQUENCES, 1, 12, 0),
        (SEQUENCES, 3, 12, 0),
        (CONTEXT, 2, 8, 0),
        (CONTEXT, 2, 20, 0),
        (QUEUE, 2, 12, 0),
        (QUEUE, 2, 12, 30),
    ]
    for point in facts["milliseconds"]:
        assert point["host"] > 0
        assert (point["step"] is None) == (point["floor"] is None) == (point["sweep"] == QUEUE)
    assert len(table) == 2 + len(loads)
    assert [f'id="axes_{panel}"' in picture.read_text() for panel in (1, 2, 3, 4)] == [True] * 3 + [False]


@pytest.mark.parametrize(("flag", "value"), [("--sequences", "5"), ("--contexts", "100000")])
def test_a_load_that_does_not_fit_is_refused(
    tiny_checkpoint_dir: Path, flag: str, value: str, capsys
) -> None:
    assert main(["growth", "--model", str(tiny_checkpoint_dir), "--max-num-seqs", "4", flag, value]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
