from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jaxserve.bench import swap
from jaxserve.config import EngineConfig
from jaxserve.progress import NullProgress


def test_it_measures_the_same_tokens_both_ways(tiny_checkpoint_dir: Path) -> None:
    options = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, block_size=8)
    times = swap.measure_swap(
        str(tiny_checkpoint_dir), options, num_tokens=20, repeats=2, progress=NullProgress()
    )
    assert len(times.out) == len(times.back) == len(times.computed) == 2
    assert min(*times.out, *times.back, *times.computed) > 0
    each = 8 * 2 * 2 * 2 * 16 * 4  # tokens, keys and values, layers, heads, their size, bytes
    assert times.num_bytes == 3 * each
    facts = json.loads(json.dumps(swap.to_json(times)))
    assert facts["num_tokens"] == 20
    known = replace(times, num_bytes=10**9, out=(0.01, 0.02, 0.09), back=(0.02,), computed=(1.0,))
    lines = swap.report(known).splitlines()
    assert "1000.0 ms  50.00 GB/s" in lines[2]
    assert "50000.0 ms" in lines[4]
    assert lines[-1] == "ratio=25.0"
