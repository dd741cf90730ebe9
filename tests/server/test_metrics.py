from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.metrics import ServerMetrics
from jaxserve.stats import BucketStats, EngineStats

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
    metrics = ServerMetrics(stats, "m")
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
