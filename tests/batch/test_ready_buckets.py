from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets, default_buckets
from jaxserve.batch.ready_buckets import ReadyBuckets, in_order_of_use
from jaxserve.errors import ConfigError
from tests.fakes import make_config

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@st.composite
def plans(draw: st.DrawFn) -> ShapeBuckets:
    max_seqs = draw(st.integers(1, 70))
    return default_buckets(
        make_config(max_num_seqs=max_seqs, max_num_batched_tokens=draw(st.integers(max_seqs, 300)))
    )


@given(plans())
def test_every_shape_is_compiled_once_and_the_first_two_run_any_step(plan: ShapeBuckets) -> None:
    everything = plan.all_buckets()
    order = in_order_of_use(everything)
    assert sorted(order) == sorted(everything)
    assert order[0] == max(everything)
    assert order[0].seqs == max(bucket.seqs for bucket in everything)
    if len(order) > 1:
        assert order[1].tokens == min(everything).tokens


@given(plans(), st.data())
def test_a_step_takes_the_smallest_shape_that_is_ready(plan: ShapeBuckets, data: st.DataObject) -> None:
    ready = ReadyBuckets(plan)
    marked: list[Bucket] = []
    assert ready.all_buckets() == plan.all_buckets()
    largest = max(plan.all_buckets())
    for bucket in in_order_of_use(plan.all_buckets()):
        ready.mark(bucket)
        marked.append(bucket)
        assert (ready.progress.ready, ready.progress.total) == (len(marked), len(plan.all_buckets()))
        tokens = data.draw(st.integers(1, largest.tokens))
        seqs = data.draw(st.integers(1, min(tokens, largest.seqs)))
        holds = [b for b in marked if b.tokens >= tokens and b.seqs >= seqs]
        assert ready.smallest_for(tokens, seqs) == min(holds)
    for tokens in range(1, largest.tokens + 1):
        assert ready.smallest_for(tokens, 1) == plan.smallest_for(tokens, 1), "all are ready"


def test_gaps_are_halved_by_ratio_so_that_padding_falls_fastest() -> None:
    sizes = (2, 4, 8, 16, 32, 64, 128, 256)
    order = in_order_of_use(Bucket(size, size, 9) for size in sizes)
    assert [bucket.tokens for bucket in order[:3]] in ([256, 2, 16], [256, 2, 32])
    both = [Bucket(8, 2, 9), Bucket(8, 8, 9), Bucket(32, 8, 9), Bucket(32, 2, 9)]
    assert in_order_of_use(both)[:2] == [Bucket(32, 8, 9), Bucket(8, 8, 9)], (
        "the one with all rows comes first"
    )


def test_nothing_is_offered_before_it_is_ready() -> None:
    ready = ReadyBuckets(ShapeBuckets(((2, (2,)), (8, (2, 8))), 4))
    with pytest.raises(ConfigError):
        ready.smallest_for(1, 1)
    ready.mark(Bucket(2, 2, 4))
    assert ready.smallest_for(2, 1) == Bucket(2, 2, 4)
    with pytest.raises(ConfigError):
        ready.smallest_for(3, 1)
