"""Block tables by themselves: admission is all or nothing, and shared blocks are counted for what they give back."""

from __future__ import annotations

import pytest

from jaxserve.request import Request
from jaxserve.scheduler.kv_cache_manager import KVCacheManager, Reuse
from tests.fakes import make_group, make_request


def admitted(kv: KVCacheManager, request: Request, source: Request | None = None) -> Request:
    """Admit with whatever can be reused, and count all tokens as computed and accepted."""
    reuse = kv.find_reusable(request, limit=request.num_tokens, source=source)
    kv.admit(request, reuse, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    kv.commit([request])
    return request


def table(kv: KVCacheManager, request_id: str, num_tokens: int) -> tuple[int, ...]:
    """The blocks that hold the first tokens."""
    return tuple(kv._tables[request_id].block_ids[: kv.blocks_for(num_tokens)])


def test_an_admission_that_does_not_fit_takes_nothing() -> None:
    kv = KVCacheManager(6, 4, True)
    prefix = list(range(16))
    warm = admitted(kv, make_request("warm", prefix))
    kv.free(warm.request_id)
    request = make_request("big", [*prefix, *range(50, 62)])
    reuse = kv.find_reusable(request, limit=100)
    assert reuse.num_tokens == 16
    with pytest.raises(ValueError, match="1 KV blocks short for big:0"):
        kv.admit(request, reuse, 28)
    assert kv.pool.num_free == 6
    kv.check_integrity([])


def test_finding_takes_no_reference() -> None:
    kv = KVCacheManager(6, 4, True)
    warm = admitted(kv, make_request("warm", 16))
    kv.free(warm.request_id)
    for _ in range(3):
        kv.find_reusable(make_request("again", warm.prompt_token_ids), limit=100)
    assert kv.pool.num_free == 6


@pytest.mark.parametrize("limit", range(12))
def test_no_more_is_reused_than_asked_for(limit: int) -> None:
    kv = KVCacheManager(12, 4, True)
    first, second = make_group("g", 10, 2)
    admitted(kv, first)
    reuse = kv.find_reusable(second, limit=limit, source=first)
    assert reuse.num_tokens == (9 if limit >= 9 else limit // 4 * 4)
    assert reuse.is_fork == (limit >= 9)
    assert (reuse.copy_source is not None) == (limit >= 9)


def test_a_prefix_hit_that_reaches_as_far_is_preferred_to_a_copy() -> None:
    kv = KVCacheManager(12, 4, True)
    first, second = make_group("g", 9, 2)
    admitted(kv, first)
    assert kv.find_reusable(second, limit=9, source=first) == Reuse(table(kv, "g:0", 8), 8)


def test_victims_give_back_shared_blocks_only_together() -> None:
    kv = KVCacheManager(6, 4, True)
    first, second = make_group("g", 10, 2)
    admitted(kv, first)
    admitted(kv, second, source=first)
    assert kv.pool.num_free == 2  # 2 shared, 1 own each
    assert kv.victims_for([second, first], 1, keep=()) == [second]
    assert kv.victims_for([second, first], 2, keep=()) == [second, first]
    assert kv.victims_for([second, first], 4, keep=()) == [second, first]
    assert kv.victims_for([second, first], 5, keep=()) is None
    assert kv.victims_for([second, first], 4, keep=table(kv, "g:0", 4)) is None
    assert kv.victims_for([], 0, keep=()) is None
    assert kv.victims_for([second, first], 0, keep=()) == [second]  # a slot alone is missing


def test_growing_stops_at_the_end_of_the_pool_and_changes_nothing_then() -> None:
    kv = KVCacheManager(3, 4, True)
    request = admitted(kv, make_request("a", 4))
    assert kv.grow(request.request_id, 12)
    assert not kv.grow(request.request_id, 13)
    assert len(table(kv, request.request_id, 12)) == 3


def test_a_block_is_registered_when_full_and_no_earlier() -> None:
    kv = KVCacheManager(6, 4, True)
    request = make_request("a", 11)
    kv.admit(request, Reuse(), 11)
    for computed, cached in ((3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        request.num_computed_tokens = computed
        kv.commit([request])
        assert kv.pool.num_cached == cached


def test_the_integrity_check_names_a_leaked_table() -> None:
    kv = KVCacheManager(6, 4, True)
    admitted(kv, make_request("a", 4))
    with pytest.raises(AssertionError, match="a:0"):
        kv.check_integrity([])


def test_the_integrity_check_sees_a_write_into_a_shared_block() -> None:
    kv = KVCacheManager(6, 4, False)
    first, second = make_group("g", 10, 2)
    admitted(kv, first)
    kv.admit(second, Reuse(table(kv, "g:0", 10), 9), 10)  # the partial block shared, not copied
    second.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="will write into shared block"):
        kv.check_integrity([first, second])
