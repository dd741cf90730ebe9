from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.bucket_expectation import expect
from jaxserve.batch.bucket_plan import Shapes, StepCost, best_plans
from jaxserve.batch.buckets import ShapeBuckets, buckets_for, default_num_shapes, default_shapes
from jaxserve.batch.step_sizes import StepLimits, StepSizes, typical_steps
from tests.batch.step_loads import at_once, poisson, steps_of, workload


def mean_cost(shapes: Shapes, sizes: StepSizes, cost: StepCost) -> float:
    """By putting each step into its bucket, as the builder does."""
    buckets = ShapeBuckets(shapes, blocks=1)
    found = [(buckets.smallest_for(*size), weight) for size, weight in sizes.weights.items()]
    return sum(weight * cost.of(bucket.tokens, bucket.seqs) for bucket, weight in found) / sizes.total


def every_plan(limits: StepLimits, max_shapes: int, max_rows_per_size: int) -> Iterator[Shapes]:
    """All that cover the limits, however bad."""
    most = max(2, limits.max_tokens)
    for below in subsets(range(2, most)):
        choices = []
        for tokens in (*below, most):
            top = min(tokens, max(2, limits.max_seqs))
            rows = [(*some, top) for some in subsets(range(2, top)) if len(some) < max_rows_per_size]
            choices.append([(tokens, some) for some in rows])
        for shapes in itertools.product(*choices):
            if sum(len(rows) for _, rows in shapes) <= max_shapes:
                yield shapes


def subsets(values: range) -> Iterator[tuple[int, ...]]:
    for count in range(len(values) + 1):
        yield from itertools.combinations(values, count)


def feasible(limits: StepLimits) -> list[tuple[int, int]]:
    return [
        (t, s)
        for t in range(1, limits.max_tokens + 1)
        for s in range(1, limits.max_seqs + 1)
        if limits.allow(t, s)
    ]


@st.composite
def problems(draw: st.DrawFn, max_tokens: int) -> tuple[StepLimits, StepSizes, StepCost]:
    most = draw(st.integers(1, max_tokens))
    limits = StepLimits(most, draw(st.integers(1, most)))
    weight = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1.0, 1e-9, 1e9]))
    weights = draw(st.dictionaries(st.sampled_from(feasible(limits)), weight, min_size=1, max_size=20))
    cost = StepCost(draw(st.sampled_from([0.0, 20.0])), draw(st.sampled_from([0.0, 0.25, 1.0, 5.0])))
    return limits, StepSizes(weights), cost


@given(problem=problems(max_tokens=7), max_shapes=st.integers(1, 9), max_rows=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_plan_is_better(
    problem: tuple[StepLimits, StepSizes, StepCost], max_shapes: int, max_rows: int
) -> None:
    limits, sizes, cost = problem
    best = min(mean_cost(plan, sizes, cost) for plan in every_plan(limits, max_shapes, max_rows))
    table = best_plans(sizes, limits, max_shapes=max_shapes, cost=cost, max_rows_per_size=max_rows)
    assert math.isclose(mean_cost(table.plan(max_shapes), sizes, cost), best, rel_tol=1e-9)


@given(data=st.data(), max_shapes=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_plans_hold_every_step_keep_the_budget_and_cost_what_they_say(
    data: st.DataObject, max_shapes: int
) -> None:
    """Also where there are too many sizes to try them all."""
    limits = StepLimits(data.draw(st.integers(1, 4000)), 1)
    limits = StepLimits(limits.max_tokens, data.draw(st.integers(1, min(300, limits.max_tokens))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seqs = rng.integers(1, limits.max_seqs + 1, data.draw(st.sampled_from([1, 5, 100, 2000])))
    tokens = rng.integers(seqs, limits.max_tokens + 1)
    sizes = StepSizes(
        {(int(t), int(s)): float(rng.random()) + 1e-6 for t, s in zip(tokens, seqs, strict=True)}
    )
    cost = StepCost()
    table = best_plans(sizes, limits, max_shapes=max_shapes, cost=cost)
    assert len(table.costs) == max_shapes
    assert list(table.costs) == sorted(table.costs, reverse=True)
    hardest = [(1, 1), (limits.max_tokens, 1), (limits.max_tokens, limits.max_seqs), (limits.max_seqs,) * 2]
    for budget, expected in enumerate(table.costs, start=1):
        plan = table.plan(budget)
        buckets = ShapeBuckets(plan, blocks=1)
        assert len(buckets.all_buckets()) <= budget
        assert all(bucket.tokens >= 2 and bucket.seqs >= 2 for bucket in buckets.all_buckets())
        assert buckets == buckets_for(plan, limits, blocks=1), "nothing in it is of no use"
        for step in (*hardest, *sizes.weights):
            buckets.smallest_for(*step)
        assert math.isclose(mean_cost(plan, sizes, cost), expected, rel_tol=1e-9)


@given(problem=problems(max_tokens=12), max_shapes=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_plan_holds_steps_that_its_distribution_never_saw(
    problem: tuple[StepLimits, StepSizes, StepCost], max_shapes: int
) -> None:
    limits, sizes, cost = problem
    table = best_plans(sizes, limits, max_shapes=max_shapes, cost=cost)
    for budget in range(1, max_shapes + 1):
        buckets = ShapeBuckets(table.plan(budget), blocks=1)
        for tokens, seqs in feasible(limits):
            bucket = buckets.smallest_for(tokens, seqs)
            assert bucket.tokens >= max(2, tokens)
            assert bucket.seqs >= seqs


def test_more_shapes_than_there_are_sizes_are_not_made() -> None:
    limits = StepLimits(64, 8)
    sizes = StepSizes({(8, 8): 1.0, (64, 3): 2.0})
    table = best_plans(sizes, limits, max_shapes=20)
    assert table.plan(20) == ((8, (8,)), (64, (3, 8)))
    assert mean_cost(table.plan(20), sizes, StepCost()) == table.costs[-1] == table.costs[2]


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs"), [(1, 1), (2, 1), (5, 5), (256, 64), (2048, 256), (8192, 1)]
)
def test_typical_steps_lie_within_the_limits(max_tokens: int, max_seqs: int) -> None:
    limits = StepLimits(max_tokens, max_seqs)
    sizes = typical_steps(limits)
    assert math.isclose(sizes.total, 1.0)
    assert all(limits.allow(*size) and weight > 0 for size, weight in sizes.weights.items())
    assert {(1, 1), (max_seqs, max_seqs), (max_tokens, max_seqs)} <= set(sizes.weights)


def test_mixing_keeps_shares() -> None:
    mixed = StepSizes({(2, 1): 30.0, (3, 3): 10.0}).mixed_with(StepSizes({(2, 1): 1.0, (9, 1): 1.0}), 0.2)
    assert mixed.weights == pytest.approx({(2, 1): 0.7, (3, 3): 0.2, (9, 1): 0.1})


def ladder(limits: StepLimits) -> Shapes:
    """What a start compiled before there were plans: two sizes an octave, made for no load in particular."""
    most, sizes, size = limits.max_tokens, {2, 8, 16, 32}, 32
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    tokens = [*sorted(size for size in sizes if size < most), most]
    tops = {size: min(size, limits.max_seqs) for size in tokens}
    return tuple(
        (size, (*(rows for rows in (16, 64, 256) if rows < tops[size] and rows * 4 <= size), tops[size]))
        for size in tokens
    )


MIXED = workload("mixed64")
LOADS = {
    "64 at once": at_once(MIXED),
    "a trickle": poisson(MIXED, 0.2),
    "one a second": poisson(MIXED, 1.0),
    "two a second": poisson(MIXED, 2.0),
    "long prompts": poisson([(300 + 11 * n % 1200, 20 + n % 200) for n in range(60)], 0.3),
    "one at a time": poisson([(10 + 7 * n, 20 + 5 * n) for n in range(20)], 0.01),
}


@pytest.mark.parametrize("limits", [StepLimits(256, 64), StepLimits(128, 16), StepLimits(2048, 256)], ids=str)
def test_a_plan_packs_better_than_a_ladder_with_as_many_shapes(limits: StepLimits) -> None:
    """On the whole, and at the price of no load: one request at a time pads its single tokens either way."""
    before = ShapeBuckets(ladder(limits), blocks=1)
    budget = len(before.all_buckets())
    assert default_num_shapes(limits) == budget * 3 // 2
    plan = best_plans(typical_steps(limits), limits, max_shapes=budget).plan(budget)
    planned = buckets_for(plan, limits, blocks=1)
    gains = []
    for name, arrivals in LOADS.items():
        sizes = steps_of(arrivals, limits)
        then, now = expect(before, sizes, StepCost()), expect(planned, sizes, StepCost())
        assert now.time_lost <= then.time_lost + 0.01, name
        gains.append(now.packing_efficiency - then.packing_efficiency)
    assert sum(gains) / len(gains) > 0.02


def test_the_default_plan_packs_a_full_server() -> None:
    """The limit of 95% is the project's own."""
    limits = StepLimits(256, 64)
    default = buckets_for(default_shapes(limits), limits, blocks=1)
    assert len(default.all_buckets()) <= default_num_shapes(limits)
    assert expect(default, steps_of(at_once(MIXED), limits), StepCost()).packing_efficiency >= 0.95


def test_a_plan_from_a_load_is_good_for_more_of_the_same() -> None:
    """Planned from one half of the requests, tried on the other; the limit of 95% is the project's own."""
    limits = StepLimits(256, 64)
    seen = steps_of(at_once(MIXED), limits).mixed_with(typical_steps(limits), 0.05)
    budget = default_num_shapes(limits)
    plan = best_plans(seen, limits, max_shapes=budget).plan(budget)
    shuffled = random.Random(1).sample(MIXED, len(MIXED))
    again = expect(buckets_for(plan, limits), steps_of(at_once(shuffled), limits), StepCost())
    assert again.packing_efficiency >= 0.95


@given(problem=problems(max_tokens=20), max_shapes=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_an_expectation_is_what_counting_gives(
    problem: tuple[StepLimits, StepSizes, StepCost], max_shapes: int
) -> None:
    limits, sizes, cost = problem
    shapes = best_plans(sizes, limits, max_shapes=max_shapes, cost=cost).plan(max_shapes)
    buckets = ShapeBuckets(shapes, blocks=1)
    expectation = expect(buckets, sizes, cost)
    assert [entry.bucket for entry in expectation.buckets] == buckets.all_buckets()[::-1]
    useful = computed = 0.0
    for size, weight in sizes.weights.items():
        bucket = buckets.smallest_for(*size)
        useful += weight * size[0]
        computed += weight * bucket.tokens
    assert expectation.packing_efficiency == pytest.approx(useful / computed)
    assert sum(entry.step_share for entry in expectation.buckets) == pytest.approx(1)
    means = sum(entry.step_share * entry.useful_tokens for entry in expectation.buckets)
    assert means == pytest.approx(useful / sizes.total)
    padding = [
        entry.step_share * sizes.total * (entry.bucket.tokens - entry.useful_tokens)
        for entry in expectation.buckets
    ]
    if computed - useful > 1e-6 * computed:
        shares = [entry.padding_share for entry in expectation.buckets]
        assert shares == pytest.approx([part / (computed - useful) for part in padding], abs=1e-6)
    rows = sum(weight * size[1] for size, weight in sizes.weights.items()) / sizes.total
    if mean_cost(shapes, sizes, cost) > 0:
        ideal = cost.of(useful / sizes.total, rows)
        assert expectation.time_lost == pytest.approx(1 - ideal / mean_cost(shapes, sizes, cost))
