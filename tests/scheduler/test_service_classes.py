"""Interactive requests pass background ones everywhere; background ones age; nobody is starved for good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import Request, RequestStatus, ServiceClass
from jaxserve.scheduler.ageing import INTERACTIVE_PER_PROMOTION, Ageing
from tests.fakes import make_request
from tests.scheduler.harness import Harness, rows
from tests.scheduler.virtual_clock import VirtualRun

BACKGROUND = ServiceClass.BACKGROUND


def background(name: str, prompt: int, max_tokens: int = 4, **kwargs: object) -> Request:
    return make_request(name, prompt, max_tokens, service_class=BACKGROUND, **kwargs)  # type: ignore[arg-type]


# Order, budget, places.


def test_interactive_requests_start_before_background_ones_of_any_priority() -> None:
    harness = Harness(100, max_num_seqs=1)
    harness.add(
        background("b", 5, priority=-9),
        background("urgent b", 5, priority=-10),
        make_request("i", 5, priority=9),
    )
    order: list[str] = []
    while harness.scheduler.has_unfinished:
        order += [row.request_id for row in harness.step().scheduled if row.is_new]
    assert order == ["i:0", "urgent b:0", "b:0"]


def test_the_prompts_of_background_requests_get_what_interactive_ones_leave() -> None:
    harness = Harness(200, max_num_seqs=8, max_num_batched_tokens=16, max_prefill_chunk=8)
    harness.add(background("long b", 60, 1), background("b", 6, 1))
    assert rows(harness.step()) == {"long b:0": 10, "b:0": 6}
    harness.add(make_request("long i", 30, 1), make_request("i", 5, 1))
    assert rows(harness.step()) == {
        "long i:0": 11,
        "i:0": 5,
    }  # all of the budget, as if nothing else were there
    assert rows(harness.step()) == {"long i:0": 16}
    assert rows(harness.step()) == {"long i:0": 3, "long b:0": 13}
    harness.drain()
    harness.check_drained()


def test_a_long_background_prompt_has_no_lane_beside_interactive_ones() -> None:
    harness = Harness(200, max_num_seqs=8, max_num_batched_tokens=16, max_prefill_chunk=8)
    harness.add(background("long b", 60, 1))
    harness.step()
    harness.add(make_request("i1", 8, 1), make_request("i2", 8, 1))
    assert rows(harness.step()) == {"i1:0": 8, "i2:0": 8}
    harness.drain()


def test_short_interactive_prompts_are_not_held_up_by_a_long_background_prompt_that_waits() -> None:
    harness = Harness(200, max_num_seqs=8, max_num_batched_tokens=16, max_prefill_chunk=8)
    long = background("long b", 60, 1)
    harness.add(long, *(make_request(f"i{n}", 4, 1) for n in range(4)))
    assert rows(harness.step()) == {f"i{n}:0": 4 for n in range(4)}
    assert long.status is RequestStatus.WAITING, "it holds a slot and blocks, and gets no token"
    harness.drain()


@pytest.mark.parametrize("lacking", ["slots", "blocks"])
def test_background_requests_make_room_for_interactive_ones(lacking: str) -> None:
    slots, blocks = (2, 100) if lacking == "slots" else (8, 8)
    harness = Harness(blocks, block_size=4, max_num_seqs=slots, max_num_batched_tokens=64)
    harness.add(background("b1", 12, 4), background("b2", 12, 4))
    harness.step()
    harness.add(make_request("i1", 12, 2))
    plan = harness.step()
    assert [request.request_id for request in plan.preempted] == ["b2:0"]
    assert set(rows(plan)) == {"i1:0", "b1:0"}
    stats = harness.stats()
    assert (stats.preemptions_by_class, stats.class_preemptions) == ({"interactive": 0, "background": 1}, 1)
    assert stats.running_by_class == {"interactive": 1, "background": 1}
    assert stats.waiting_by_class == {"interactive": 0, "background": 1}
    harness.drain()
    harness.check_drained()


def test_interactive_requests_take_nobodys_place_among_themselves() -> None:
    harness = Harness(100, max_num_seqs=2)
    harness.add(make_request("a", 5, 9, client="a"), make_request("b", 5, 9, client="b"))
    harness.step()
    harness.add(make_request("c", 5, 9, client="c"))
    harness.drain()
    assert harness.stats().preemptions == 0


# Ageing.


@given(
    waits=st.lists(st.integers(0, 20), max_size=20),
    admissions=st.lists(st.integers(0, 12), min_size=1, max_size=40),
)
def test_promotions_are_as_many_as_interactive_admissions_allow_and_no_more(
    waits: list[int], admissions: list[int]
) -> None:
    ageing = Ageing(max_wait=5.0)
    for number, since in enumerate(waits):
        ageing.waits(str(number), float(since))
    in_turn = sorted(range(len(waits)), key=lambda number: (waits[number], number))
    promoted: list[str] = []
    latest: list[int] = []  # for each in turn: interactive admissions by which it must be promoted
    num_admitted = 0
    for now, count in enumerate(admissions):
        while len(latest) < len(waits) and waits[in_turn[len(latest)]] + 5 <= now:
            ahead = len(latest) - len(promoted)  # due, too, and not promoted yet
            latest.append(num_admitted + INTERACTIVE_PER_PROMOTION * (ahead + 1))
        while (request_id := ageing.take_due(float(now))) is not None:
            assert waits[int(request_id)] + 5 <= now, f"{request_id} has not waited for long enough"
            promoted.append(request_id)
        assert len(promoted) * INTERACTIVE_PER_PROMOTION <= num_admitted
        assert len(promoted) >= sum(bound <= num_admitted for bound in latest)
        for _ in range(count):
            ageing.interactive_admitted()
        num_admitted += count
    assert promoted == [str(number) for number in in_turn[: len(promoted)]]


class Flood:
    """Interactive requests of one kind; always so many wait, together with all others."""

    def __init__(self, run: VirtualRun, waiting: int, prompt: int, output: int) -> None:
        self.run, self.waiting, self.prompt, self.output = run, waiting, prompt, output
        self.count = 0
        self.clients, self.priority = 1, 0

    def step(self) -> None:
        while self.run.scheduler.num_waiting < self.waiting:
            client = f"client {self.count % self.clients}"
            self.run.add(
                make_request(
                    f"i{self.count}", self.prompt, self.output, client=client, priority=self.priority
                )
            )
            self.count += 1
        self.run.step()

    @property
    def num_started(self) -> int:
        return sum(request_id.startswith("i") for request_id in self.run.order)


@settings(max_examples=25, deadline=None)
@given(
    num_aged=st.integers(1, 6),
    slots=st.integers(1, 6),
    output=st.integers(1, 8),
    prompt=st.sampled_from([5, 40]),
    priority=st.sampled_from([0, -5]),
    clients=st.sampled_from([1, 7]),
    flood_priority=st.sampled_from([0, -9]),
)
def test_under_an_endless_interactive_flood_background_requests_start_within_the_stated_bound(
    num_aged: int, slots: int, output: int, prompt: int, priority: int, clients: int, flood_priority: int
) -> None:
    """The k-th is the next to start after 3 k interactive admissions past its time, and starts with the next slot."""
    max_wait = 0.8
    run = VirtualRun(max_num_seqs=slots, max_num_batched_tokens=64, background_max_wait=max_wait)
    flood = Flood(run, 20, prompt, output)
    flood.clients, flood.priority = clients, flood_priority
    aged = [background(f"b{number}", 30, 3, priority=priority) for number in range(num_aged)]
    for request in aged:
        run.add(request)
    due_after: int | None = None
    for _ in range(5000):
        if due_after is None and run.now >= max_wait:
            due_after = flood.num_started
        flood.step()
        for k, request in enumerate(aged, start=1):
            if (
                due_after is not None
                and request.status is RequestStatus.WAITING
                and not request.output_token_ids
            ):
                # Promoted by then; and every running request leaves within so many admissions of others.
                assert flood.num_started - due_after <= INTERACTIVE_PER_PROMOTION * k + slots
        if all(request.is_finished for request in aged):
            break
    assert all(request.is_finished for request in aged)
    assert all(run.started_at[request.request_id] >= max_wait for request in aged)
    assert all(request.num_preemptions == 0 for request in aged)
    assert run.stats().promotions == num_aged
    assert run.stats().preemptions == 0  # who is promoted takes nobody's place


def test_what_is_preempted_again_and_again_is_promoted_in_the_end() -> None:
    """Each of its waits is shorter than the bound; together they are longer."""
    run = VirtualRun(max_num_seqs=1, max_num_batched_tokens=32, background_max_wait=1.0)
    victim = background("b", 4, 60)
    run.add(victim)
    number = 0
    while not victim.is_finished:
        for _ in range(12):  # a pause in which it runs, and is then preempted
            if not victim.is_finished:
                run.step()
        run.add(make_request(f"i{number}", 4, 8))
        number += 1
        assert number < 30, "never promoted"
    assert victim.num_preemptions >= 2
    assert run.stats().promotions == 1


def test_a_thousand_aged_requests_take_a_quarter_of_the_admissions_at_most() -> None:
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=64, background_max_wait=0.5)
    for number in range(1000):
        run.add(background(f"b{number}", 4, 2))
    run.now = 10.0  # all of them are due, at once
    flood = Flood(run, 1012, 4, 2)
    for _ in range(100):
        flood.step()
        flood.waiting = 1012 - run.stats().promotions
    interactive = flood.num_started
    aged = len(run.order) - interactive
    assert interactive > 150
    assert interactive / INTERACTIVE_PER_PROMOTION - 8 <= aged <= interactive / INTERACTIVE_PER_PROMOTION + 8
    ttfts = [ttft for request_id, ttft in run.ttfts.items() if request_id.startswith("i")]
    alone = VirtualRun(max_num_seqs=8, max_num_batched_tokens=64)
    flood = Flood(alone, 12, 4, 2)
    for _ in range(100):
        flood.step()
    assert max(ttfts) <= 2 * max(alone.ttfts.values())


def test_background_work_alone_is_served_as_it_came_however_long_it_waits() -> None:
    run = VirtualRun(max_num_seqs=2, background_max_wait=0.01)
    run.run((0.0, background(f"b{number}", 5, 5)) for number in range(30))
    assert run.order == [f"b{number}:0" for number in range(30)]
    assert (run.stats().promotions, run.stats().preemptions) == (0, 0)
