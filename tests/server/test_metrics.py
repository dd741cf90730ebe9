from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.server.metrics import ServerMetrics
from jaxserve.stats import BucketStats, EngineStats, SwapStats

BUCKETS = [(2, 2), (16, 4), (16, 16), (300, 64)]


def samples(metrics: ServerMetrics, name: str) -> dict[tuple[int, int], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == name:
                assert set(sample.labels) == {"model_name", "tokens", "seqs"}
                found[int(sample.labels["tokens"]), int(sample.labels["seqs"])] = sample.value
    return found


def test_steps_and_padding_are_told_apart_by_bucket() -> None:
    stats = EngineStats(by_bucket={bucket: BucketStats() for bucket in BUCKETS})
    metrics = ServerMetrics(stats, CircuitBreaker(BreakerLimits(), time.monotonic), "m")
    for name in ("bucket_steps", "bucket_padding_tokens", "bucket_padding_rows"):
        assert samples(metrics, f"jaxserve:{name}_total") == dict.fromkeys(BUCKETS, 0), (
            "from the start, and all"
        )
    stats.count_step((2, 2), num_tokens=1, num_rows=1)
    stats.count_step((16, 4), num_tokens=16, num_rows=3)
    stats.count_step((16, 4), num_tokens=12, num_rows=4)
    assert samples(metrics, "jaxserve:bucket_steps_total") == {
        (2, 2): 1,
        (16, 4): 2,
        (16, 16): 0,
        (300, 64): 0,
    }
    assert samples(metrics, "jaxserve:bucket_padding_tokens_total") == {
        (2, 2): 1,
        (16, 4): 4,
        (16, 16): 0,
        (300, 64): 0,
    }
    assert samples(metrics, "jaxserve:bucket_padding_rows_total") == {
        (2, 2): 1,
        (16, 4): 1,
        (16, 16): 0,
        (300, 64): 0,
    }
    assert (stats.steps, stats.useful_tokens, stats.padded_tokens) == (3, 29, 34)


def test_preemptions_and_swaps_are_told_apart_by_kind() -> None:
    swap = SwapStats(blocks=50, used_blocks=7, pinned_blocks=3, block_bytes=1000, out_blocks=9, in_blocks=4)
    swap.preemptions, swap.requests_in, swap.hits, swap.in_bytes_per_second = 2, 1, 64, 5e9
    breaker = CircuitBreaker(BreakerLimits(), time.monotonic)
    text = ServerMetrics(EngineStats(preemptions=5, swap=swap), breaker, "m").render().decode()
    seen = {
        (sample.name, *(v for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert seen["jaxserve:preemptions_total", "swap"] == 2
    assert seen["jaxserve:preemptions_total", "recompute"] == 3
    assert seen["jaxserve:swap_bytes_total", "out"] == 9000
    assert seen["jaxserve:swap_bytes_total", "in"] == 4000
    assert seen["jaxserve:swap_blocks_total", "in"] == 4
    states = {key[1]: value for key, value in seen.items() if key[0] == "jaxserve:host_tier_blocks"}
    assert states == {"all": 50, "used": 7, "pinned": 3}
    assert seen["jaxserve:swap_bytes_per_second", "in"] == 5e9
    assert (seen["jaxserve:swapped_requests_total",], seen["jaxserve:host_tier_hits_total",]) == (1, 64)
