"""The block pool by itself: references, the order of eviction, and a state machine against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.scheduler.block_pool import BlockPool


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def pool_with_chain(num_blocks: int, length: int) -> tuple[BlockPool, list[int]]:
    """A pool in which one request holds a table of `length` registered blocks."""
    pool = BlockPool(num_blocks, 4, True)
    table = pool.allocate(length)
    for index, block in enumerate(table):
        assert pool.register(digest(index), block)
    return pool, table


def test_every_block_but_the_sink_is_handed_out() -> None:
    pool = BlockPool(5, 4, True)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3, 4, True)
    pool.allocate(1)
    with pytest.raises(ValueError, match="asked for 3 KV blocks, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity()


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(3, 4, True)
    table = pool.allocate(2)
    pool.free(table)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(table)


def test_a_freed_block_is_found_until_it_is_handed_out_again() -> None:
    pool, table = pool_with_chain(3, 3)
    pool.free(table)
    assert pool.lookup(digest(0)) == table[0]
    pool.allocate(3)
    assert pool.lookup(digest(0)) is None
    assert pool.evictions == 3


def test_the_tail_of_a_table_is_evicted_before_its_beginning() -> None:
    pool, table = pool_with_chain(6, 6)
    pool.free(table)
    for survivors in range(5, -1, -1):
        pool.allocate(1)
        assert [pool.lookup(digest(i)) is not None for i in range(6)] == [i < survivors for i in range(6)]


def test_blocks_without_a_known_prefix_go_before_cached_ones() -> None:
    pool, cached = pool_with_chain(4, 2)
    plain = pool.allocate(2)
    pool.free(cached)
    pool.free(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.evictions == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool, (a, b) = pool_with_chain(2, 2)
    pool.free([a])
    pool.free([b])
    pool.touch([a])
    pool.free([a])
    assert pool.allocate(1) == [b]


def test_a_referenced_hit_is_not_evicted() -> None:
    pool, table = pool_with_chain(4, 2)
    pool.free(table)
    pool.touch(table)
    assert not set(pool.allocate(2)) & set(table)
    assert pool.num_free == 0
    assert pool.evictions == 0


def test_a_block_without_content_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="holds no known prefix"):
        BlockPool(2, 4, True).touch([1])


def test_the_second_copy_of_a_prefix_is_not_entered() -> None:
    pool = BlockPool(2, 4, True)
    first, second = pool.allocate(2)
    assert pool.register(digest(7), first)
    assert not pool.register(digest(7), second)
    assert pool.lookup(digest(7)) == first
    assert pool.digest(second) is None


def test_a_block_has_one_digest_and_only_while_held() -> None:
    pool = BlockPool(2, 4, True)
    (block,) = pool.allocate(1)
    pool.register(digest(1), block)
    with pytest.raises(ValueError, match="under another digest"):
        pool.register(digest(2), block)
    pool.free([block])
    with pytest.raises(ValueError, match="is free"):
        pool.register(digest(1), block)


def test_without_prefix_caching_nothing_is_entered() -> None:
    pool = BlockPool(2, 4, False)
    (block,) = pool.allocate(1)
    assert not pool.register(digest(1), block)
    assert pool.lookup(digest(1)) is None


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool, block: pool._ref_counts.__setitem__(block, 0),
        lambda pool, block: pool._free.__setitem__(block, None),
        lambda pool, block: pool._block_of.pop(digest(0)),
        lambda pool, block: pool._digests.__setitem__(block, digest(99)),
        lambda pool, block: pool._ref_counts.__setitem__(0, 1),
        lambda pool, block: pool._free.__setitem__(0, None),
    ],
)
def test_the_integrity_check_sees_corruption(corrupt) -> None:  # type: ignore[no-untyped-def]
    pool, table = pool_with_chain(4, 2)
    pool.check_integrity()
    corrupt(pool, table[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against lists: holders with their tables, and which digest each block should have."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4, True)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.known: dict[int, bytes] = {}  # block -> digest
        self.next_digest = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.num_blocks - len({block for table in self.tables for block in table})
        if count > free:
            with pytest.raises(ValueError, match="are free"):
                self.pool.allocate(count)
            return
        evictions = self.pool.evictions
        table = self.pool.allocate(count)
        lost = [block for block in table if self.known.pop(block, None)]
        assert self.pool.evictions - evictions == len(lost)
        self.tables.append(table)
        if lost:  # only once no others were left
            assert all(block in self.known for block in self.pool.free_ids())

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        for block in data.draw(st.sampled_from(self.tables)):
            if block not in self.known:
                name = digest(self.next_digest)
                self.next_digest += 1
                assert self.pool.register(name, block)
                self.known[block] = name

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.known)), unique=True, max_size=4))
        found = [self.pool.lookup(self.known[block]) for block in blocks]
        assert found == blocks
        self.pool.touch(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.known)))
        self.pool.unregister(block)
        del self.known[block]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        for block in range(1, self.num_blocks + 1):
            assert self.pool.ref_count(block) == sum(table.count(block) for table in self.tables)
            assert self.pool.digest(block) == self.known.get(block)
        assert self.pool.num_cached == len(self.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
