"""Clients share tokens: bounds that hold whatever the sizes, nobody pays for another's backlog or his own absence."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.scheduler.fairness import FairShares
from jaxserve.scheduler.output_length import OutputLengths
from tests.fakes import make_request
from tests.scheduler.harness import Harness
from tests.scheduler.virtual_clock import VirtualRun

LEVEL = (0, 0)
SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@given(mine=SIZES, theirs=SIZES, weight=st.sampled_from([1, 2, 5]))
def test_tokens_of_two_backlogged_clients_differ_by_one_longest_request_of_each(
    mine: list[int], theirs: list[int], weight: int
) -> None:
    shares = FairShares()
    queue = [(shares.arrive(LEVEL, "a", size / weight), 0, i, "a", size) for i, size in enumerate(mine)]
    queue += [(shares.arrive(LEVEL, "b", size), 1, i, "b", size) for i, size in enumerate(theirs)]
    left = Counter(entry[3] for entry in queue)
    served = Counter({"a": 0, "b": 0})
    for tag, _, _, client, size in sorted(queue):
        shares.admitted(LEVEL, tag, size / (weight if client == "a" else 1))
        served[client] += size
        left[client] -= 1
        if not all(left.values()):
            return
        assert abs(served["a"] / weight - served["b"]) <= max(mine) / weight + max(theirs)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 50), st.booleans()), max_size=200))
def test_virtual_time_never_goes_back_and_nothing_is_kept_of_those_who_left(
    actions: list[tuple[str, int, bool]],
) -> None:
    shares = FairShares()
    waiting: list[tuple[float, int, str, int]] = []
    running: list[tuple[str, int]] = []
    for number, (client, cost, arrives) in enumerate(actions):
        if arrives:
            waiting.append((shares.arrive(LEVEL, client, cost), number, client, cost))
        elif waiting:
            waiting.sort()
            tag, _, owner, paid = waiting.pop(0)
            before = shares._levels[LEVEL].virtual_time
            shares.admitted(LEVEL, tag, paid)
            assert shares._levels[LEVEL].virtual_time >= max(before, tag)
            running.append((owner, paid))
        elif running:
            shares.ended(LEVEL, running.pop()[0], 0.0)
    for _, _, owner, cost in waiting:
        shares.ended(LEVEL, owner, cost)
    for owner, _ in running:
        shares.ended(LEVEL, owner, 0.0)
    assert shares._levels == {}


def test_one_request_does_not_wait_for_a_thousand_of_another_client() -> None:
    run = VirtualRun(max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(1000):
        run.add(make_request(f"many{number}", 8, 8, client="many"))
    for _ in range(20):
        run.step()
    run.add(make_request("one", 8, 8, client="one"))
    before = len(run.order)
    while "one:0" not in run.order:
        run.step()
    assert run.order.index("one:0") <= before + 1  # the next, or the one after that


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 6))
def test_backlogged_clients_get_equal_shares_of_tokens_within_the_stated_bound(seed: int, slots: int) -> None:
    rng = random.Random(seed)
    run = VirtualRun(max_num_seqs=slots, max_num_batched_tokens=48)
    sizes = {"small": (2, 6), "large": (20, 60)}
    longest = {client: 2 * high for client, (_, high) in sizes.items()}
    requests: list[Request] = []
    for client, count in (("small", 60), ("large", 8)):
        for number in range(count):
            prompt, output = (rng.randint(*sizes[client]) for _ in range(2))
            requests.append(make_request(f"{client}{number}", prompt, output, client=client))
            run.add(requests[-1])
    served: Counter[str] = Counter()
    while {r.client for r in requests if r.num_cached_tokens is None} == {"small", "large"}:
        run.step()
        served.clear()
        running: Counter[str] = Counter()
        for request in requests:
            computed = request.num_prompt_tokens if request.is_finished else request.num_computed_tokens
            served[request.client] += min(computed, request.num_prompt_tokens) + request.num_output_tokens
            if request.status is RequestStatus.RUNNING:
                running[request.client] += longest[request.client]
        # What was admitted differs by one longest request of each, and what runs has not got all of its yet.
        allowed = sum(longest.values()) + max(running.values(), default=0)
        assert abs(served["small"] - served["large"]) <= allowed
    assert min(served.values()) > 0


def test_a_client_that_was_away_is_not_paid_for_it_and_one_seen_first_passes_nobody_for_ever() -> None:
    run = VirtualRun(max_num_seqs=1, max_num_batched_tokens=32)
    for number in range(30):  # alone for a long time
        run.add(make_request(f"busy{number}", 5, 5, client="busy"))
    for _ in range(60):
        run.step()
    for number in range(30):
        run.add(make_request(f"new{number}", 5, 5, client="new"))
    start = len(run.order)
    while len(run.order) < start + 20:
        run.step()
    assert Counter(name[:3] for name in run.order[start:])["new"] in (9, 10, 11)

    run = VirtualRun(max_num_seqs=1, max_num_batched_tokens=32)
    for number in range(3):
        run.add(make_request(f"regular{number}", 5, 5, client="regular"))
    for number in range(60):  # each from another client, two of them waiting all the time
        while run.scheduler.num_waiting < 5:
            run.add(
                make_request(
                    f"stranger{number}.{run.scheduler._num_added}",
                    5,
                    5,
                    client=f"s{run.scheduler._num_added}",
                )
            )
        run.step()
    assert sum(name.startswith("regular") for name in run.order) == 3


def test_what_a_client_aborts_is_not_held_against_it() -> None:
    harness = Harness(200, max_num_seqs=1)
    keep = make_request("keep", 5, 30, client="c")
    gone = [make_request(f"gone{number}", 50, 50, client="b") for number in range(50)]
    others = [make_request(f"a{number}", 10, 10, client="a") for number in range(5)]
    harness.add(keep)
    harness.step()
    harness.add(*gone, *others)
    harness.scheduler.abort([request.request_id for request in gone])
    late = make_request("late", 10, 10, client="b")
    harness.add(late)
    order: list[str] = []
    while harness.scheduler.has_unfinished:
        order += [row.request_id for row in harness.step().scheduled if row.is_new]
    assert order.index("late:0") <= 1


def test_clients_of_another_class_or_priority_are_apart() -> None:
    shares = FairShares()
    assert shares.arrive((0, 0), "a", 100) == 0
    assert shares.arrive((0, 1), "a", 100) == 0
    assert shares.arrive((0, 0), "a", 100) == 100


# How long outputs will be.


def ended(tokens: int, reason: FinishReason, **kwargs: object) -> Request:
    request = make_request("r", 3, 1000, **kwargs)  # type: ignore[arg-type]
    request.output_token_ids = [1] * tokens
    request.finish_reason = reason
    return request


def test_outputs_that_only_their_limit_ends_are_known() -> None:
    lengths = OutputLengths()
    assert lengths.expected(make_request("r", 3, 700)) == 700
    assert lengths.expected(ended(100, FinishReason.LENGTH)) == 900


@pytest.mark.parametrize("mean", [5, 80, 600])
def test_outputs_that_may_stop_are_learned(mean: int) -> None:
    rng = random.Random(mean)
    lengths = OutputLengths()
    for _ in range(2000):
        length = min(1000, 1 + int(rng.expovariate(1 / mean)))
        lengths.observe(ended(length, FinishReason.LENGTH if length == 1000 else FinishReason.STOP, eos=[3]))
    fresh = make_request("r", 3, 1000, eos=[3])
    samples = [min(1000.0, rng.expovariate(1 / mean)) for _ in range(20_000)]
    assert lengths.expected(fresh) == pytest.approx(sum(samples) / len(samples), rel=0.3)
    assert lengths.expected(make_request("r", 3, 2, eos=[3])) <= 2
