"""Views of steps and of the pool say what the scheduler's own state says, whatever has happened."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine_view import MAX_CELLS, PoolView
from jaxserve.scheduler.block_pool import BlockPool
from jaxserve.scheduler.host_tier import HostTier
from jaxserve.scheduler.view import view_pool, view_step
from tests.fakes import make_request
from tests.scheduler.harness import Harness


def check(view: PoolView, pool: BlockPool, max_cells: int) -> None:
    """Against the definition, block by block."""
    kinds = []
    for block in range(1, pool.num_blocks + 1):
        count = pool.ref_count(block)
        free = "cached" if pool.digest(block) is not None else "free"
        kinds.append(free if count == 0 else "used" if count == 1 else "shared")
    per_cell = view.blocks_per_cell
    assert len(view.used_cells) == -(-pool.num_blocks // per_cell) <= max_cells
    assert per_cell == 1 or pool.num_blocks > max_cells
    for kind in ("used", "shared", "cached"):
        cells = [kinds[start : start + per_cell].count(kind) for start in range(0, pool.num_blocks, per_cell)]
        assert list(getattr(view, f"{kind}_cells")) == cells
        assert getattr(view, kind) == kinds.count(kind)
    assert view.num_blocks == pool.num_blocks


@settings(max_examples=40)
@given(
    num_blocks=st.integers(1, 70),
    max_cells=st.integers(1, 40),
    what=st.lists(
        st.tuples(st.sampled_from(("take", "share", "name", "drop")), st.integers(0, 99)), max_size=60
    ),
)
def test_the_map_is_the_pool(num_blocks: int, max_cells: int, what: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(num_blocks, 4, True), []
    for number, (action, which) in enumerate(what):
        if action == "take" and pool.num_free:
            held += pool.allocate(1)
        elif held and action == "share":
            pool.touch([held[which % len(held)]])
            held.append(held[which % len(held)])
        elif held and action == "name" and pool.digest(held[which % len(held)]) is None:
            pool.register(number.to_bytes(32, "little"), held[which % len(held)])
        elif held and action == "drop":
            pool.free([held.pop(which % len(held))])
    check(view_pool(pool, HostTier(0), max_cells), pool, max_cells)


def test_a_large_pool_has_a_bounded_map() -> None:
    pool = BlockPool(100_001, 16, True)
    pool.allocate(1000)
    view = view_pool(pool, HostTier(0))
    assert len(view.used_cells) == len(view.shared_cells) == len(view.cached_cells) <= MAX_CELLS
    assert sum(view.used_cells) == view.used == 1000


def test_a_step_is_all_of_its_bucket() -> None:
    """Prompts, newest tokens and drafts of a busy run, each step checked against its plan."""
    harness = Harness(40, num_speculative_tokens=3, max_num_batched_tokens=16)
    harness.add(*(make_request(f"r{i}", 3 + 9 * i, 12, speculative_tokens=2) for i in range(4)))
    seen = set()
    while harness.scheduler.has_unfinished:
        plan = harness.step()
        view = view_step(plan, 32, 8)
        assert view.decode + view.draft + sum(view.prefill) + view.padding == view.bucket_tokens == 32
        assert view.padding == 32 - plan.num_scheduled_tokens
        assert view.decode + len(view.prefill) == len(plan.scheduled)
        assert view.draft == plan.num_draft_tokens
        assert all(length > 1 for length in view.prefill)
        check(harness.scheduler.view_pool(), harness.scheduler._kv.pool, MAX_CELLS)
        seen |= {kind for kind in ("decode", "draft", "prefill") if getattr(view, kind)}
    assert seen == {"decode", "draft", "prefill"}


def test_host_memory_is_counted() -> None:
    harness = Harness(16, host_blocks=40)
    harness.add(make_request("victim", 24, 30, priority=1))
    for _ in range(10):
        harness.step()
    harness.add(make_request("urgent", 40, 12))
    pinned = used = 0
    while harness.scheduler.has_unfinished:
        harness.step()
        view, swap = harness.scheduler.view_pool(), harness.stats().swap
        host = (view.host_blocks, view.host_used, view.host_pinned)
        assert host == (swap.blocks, swap.used_blocks, swap.pinned_blocks)
        pinned, used = max(pinned, view.host_pinned), max(used, view.host_used)
    assert pinned
    assert used
