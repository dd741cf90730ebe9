from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets, default_buckets
from jaxserve.errors import ConfigError
from tests.fakes import make_config

LIMITS = [
    (1, 1),
    (1, 2),
    (1, 3),
    (2, 3),
    (3, 3),
    (1, 7),
    (7, 100),
    (64, 100),
    (100, 100),
    (17, 33),
    (5, 257),
    (64, 64),
]


def buckets_for(max_num_seqs: int, max_num_batched_tokens: int) -> ShapeBuckets:
    return default_buckets(
        make_config(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=130
        )
    )


def check_covers(max_num_seqs: int, max_tokens: int, batches: list[tuple[int, int]]) -> None:
    buckets = buckets_for(max_num_seqs, max_tokens)
    closed = set(buckets.all_buckets())
    for num_tokens, num_seqs in batches:
        bucket = buckets.smallest_for(num_tokens, num_seqs)
        assert bucket in closed, "a shape that warm-up never sees"
        assert bucket.tokens >= num_tokens
        assert bucket.seqs >= num_seqs
        assert not any(
            (b.tokens, b.seqs) < (bucket.tokens, bucket.seqs)
            and b.tokens >= num_tokens
            and b.seqs >= num_seqs
            for b in closed
        ), "a smaller one would have done"


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), LIMITS)
def test_every_batch_within_the_limits_has_its_bucket(max_num_seqs: int, max_tokens: int) -> None:
    check_covers(
        max_num_seqs,
        max_tokens,
        [(t, s) for t in range(1, max_tokens + 1) for s in range(1, min(t, max_num_seqs) + 1)],
    )


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_every_batch_within_large_limits_has_its_bucket(data: st.DataObject) -> None:
    max_num_seqs = data.draw(st.integers(1, 600))
    max_tokens = data.draw(st.integers(max_num_seqs, 20_000))
    batches = [(max_tokens, max_num_seqs), (max_tokens, 1), (1, 1)]
    for _ in range(10):
        tokens = data.draw(st.integers(1, max_tokens))
        batches.append((tokens, data.draw(st.integers(1, min(tokens, max_num_seqs)))))
    check_covers(max_num_seqs, max_tokens, batches)


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), LIMITS)
def test_shapes_are_sound(max_num_seqs: int, max_tokens: int) -> None:
    shapes = buckets_for(max_num_seqs, max_tokens).all_buckets()
    assert len(set(shapes)) == len(shapes)
    assert shapes == sorted(shapes, reverse=True), "the most demanding shape is compiled first"
    for shape in shapes:
        assert 1 <= shape.seqs <= shape.tokens
        assert shape.tokens >= 2
        assert shape.tokens <= max(2, max_tokens), "larger than any batch"
        assert shape.seqs <= max(2, max_num_seqs)
        assert shape.blocks == -(-130 // 4)
    names = [str(shape) for shape in shapes]
    assert len(set(names)) == len(names), "names tell programs apart"


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 3), (7, 100), (64, 256), (100, 300)])
def test_a_larger_batch_never_gets_a_smaller_bucket(max_num_seqs: int, max_tokens: int) -> None:
    buckets = buckets_for(max_num_seqs, max_tokens)
    for t in range(1, max_tokens):
        for s in range(1, min(t, max_num_seqs) + 1):
            here = buckets.smallest_for(t, s)
            assert buckets.smallest_for(t + 1, s).tokens >= here.tokens
            if s < min(t, max_num_seqs):
                more = buckets.smallest_for(t, s + 1)
                assert more.tokens == here.tokens, "rows alone never ask for more tokens"
                assert more.seqs >= here.seqs


def test_edges_round_up_and_only_past_the_edge() -> None:
    buckets = buckets_for(64, 300)
    sizes = [t for t, _ in buckets.seqs_by_tokens]
    assert sizes[-1] == 300
    for smaller, larger in pairwise(sizes):
        assert buckets.smallest_for(smaller - 1, 1).tokens == smaller or smaller - 1 in sizes
        assert buckets.smallest_for(smaller, 1).tokens == smaller
        assert buckets.smallest_for(smaller + 1, 1).tokens == larger
    for tokens, rows in buckets.seqs_by_tokens:
        for smaller, larger in pairwise(rows):
            assert buckets.smallest_for(tokens, smaller).seqs == smaller
            assert buckets.smallest_for(tokens, smaller + 1).seqs == larger


@pytest.mark.parametrize(("tokens", "seqs"), [(101, 1), (8, 9), (100, 65)])
def test_a_batch_beyond_the_limits_is_refused(tokens: int, seqs: int) -> None:
    buckets = ShapeBuckets(((8, (8,)), (100, (16, 64))), blocks=3)
    if (tokens, seqs) == (8, 9):
        assert buckets.smallest_for(tokens, seqs) == Bucket(100, 16, 3)
    else:
        with pytest.raises(ConfigError, match=f"{tokens} tokens of {seqs} sequences"):
            buckets.smallest_for(tokens, seqs)


def test_few_shapes_however_large_the_limits() -> None:
    """Each one costs seconds of start-up."""
    assert len(buckets_for(64, 256).all_buckets()) <= 24
    assert len(buckets_for(256, 8192).all_buckets()) <= 72


def test_buckets_are_values() -> None:
    bucket = Bucket(2, 1, 4)
    assert {bucket: 1}[Bucket(2, 1, 4)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        bucket.tokens = 3  # type: ignore[misc]
