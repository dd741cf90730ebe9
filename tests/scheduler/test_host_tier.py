"""The host tier next to a model that keeps sets, through random lives."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.scheduler.host_tier import HostTier

DIGESTS = [bytes([i]) for i in range(8)]
digests = st.sampled_from(DIGESTS)


class TierMachine(RuleBasedStateMachine):
    """`used` is in order of use, the last one most recently."""

    @initialize(num_blocks=st.integers(0, 5))
    def start(self, num_blocks: int) -> None:
        self.tier = HostTier(num_blocks)
        self.used: list[bytes] = []
        self.pins: list[list[bytes]] = []
        self.reads: dict[bytes, int] = {}
        self.lost: set[int] = set()  # blocks about to be read, of which the content has been discarded

    def kept(self) -> set[bytes]:
        return {digest for pin in self.pins for digest in pin} | set(self.reads)

    @rule(digest=digests)
    def take(self, digest: bytes) -> None:
        idle = [d for d in self.used if d not in self.kept()]
        free = self.tier.num_blocks - len(self.used) - len(self.lost)
        was_there = digest in self.used
        block_id = self.tier.take(digest)
        assert (block_id is None) == (was_there or not (free or idle))
        if block_id is not None:
            assert block_id not in self.reads.values()
            assert block_id not in self.lost
            if not free:
                gone = [d for d in self.used if self.tier.lookup(d) is None]
                assert len(gone) == 1
                assert gone[0] in idle, "a block that was kept is gone"
                self.used.remove(gone[0])
            self.used.append(digest)

    @rule(chosen=st.lists(digests, unique=True, max_size=6))
    def pin(self, chosen: list[bytes]) -> None:
        pinned_before = {digest for pin in self.pins for digest in pin}
        pinned = self.tier.pin(chosen)
        assert pinned == chosen[: len(pinned)]
        assert len(pinned_before | set(pinned)) <= max(self.tier.num_blocks, len(pinned_before))
        if len(pinned) < len(chosen):
            assert len(pinned_before | set(pinned)) == self.tier.num_blocks, "there was room for more"
        self.pins.append(pinned)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.used))
        self.reads[digest] = self.tier.read(digest)
        assert self.reads[digest] == self.tier.lookup(digest)

    @rule()
    def end_reads(self) -> None:
        self.tier.end_reads()
        self.reads.clear()
        self.lost.clear()

    @rule(digest=digests)
    def discard(self, digest: bytes) -> None:
        self.tier.discard(digest)
        if digest in self.used:
            self.used.remove(digest)
            if digest in self.reads:
                self.lost.add(self.reads.pop(digest))

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check_integrity()
            assert {d for d in DIGESTS if self.tier.lookup(d) is not None} == set(self.used)
            blocks = [self.tier.lookup(d) for d in self.used]
            assert len(set(blocks)) == len(blocks)
            assert self.tier.num_used == len(self.used) + len(self.lost)
            assert self.tier.num_pinned == len({digest for pin in self.pins for digest in pin})
            for digest, block_id in self.reads.items():
                assert self.tier.lookup(digest) == block_id, "it is to be read, and gone"


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_goes_first() -> None:
    tier = HostTier(3)
    for digest in DIGESTS[:3]:
        tier.take(digest)
    assert tier.take(DIGESTS[0]) is None  # used again
    pinned = tier.pin([DIGESTS[1]])
    tier.take(DIGESTS[3])
    assert [tier.lookup(d) is not None for d in DIGESTS[:4]] == [True, True, False, True]
    tier.unpin(pinned)  # used last now
    tier.take(DIGESTS[4])
    tier.take(DIGESTS[5])
    assert [tier.lookup(d) is not None for d in DIGESTS[:6]] == [False, True, False, False, True, True]
    assert tier.evictions == 3


def test_room_that_is_pinned_is_there_when_the_block_comes() -> None:
    tier = HostTier(3)
    for digest in DIGESTS[:3]:
        tier.take(digest)
    assert tier.pin(DIGESTS[3:8]) == DIGESTS[3:6]
    assert all(tier.take(digest) is not None for digest in DIGESTS[3:6])
    assert tier.take(DIGESTS[6]) is None, "all is kept"
