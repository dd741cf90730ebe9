"""Who has a target for his first token is not passed once his time gets short; fairness holds before that."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import Request, ServiceClass, ServiceTargets
from jaxserve.scheduler.due_queue import DueQueue
from jaxserve.scheduler.promises import Promises
from tests.fakes import make_request
from tests.scheduler.virtual_clock import VirtualRun


def wanting(name: str, seconds: float, arrival: float = 0.0, **kwargs: object) -> Request:
    made = make_request(name, 60, 2, targets=ServiceTargets(ttft_seconds=seconds), **kwargs)  # type: ignore[arg-type]
    made.arrival_time = arrival
    return made


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "leave", "pop"]), st.integers(0, 5), st.floats(0, 10)),
        max_size=300,
    )
)
def test_a_due_queue_is_a_dict_sorted_by_time(operations: list[tuple[str, int, float]]) -> None:
    queue = DueQueue()
    known: dict[str, float] = {}
    for what, number, time in operations:
        name = str(number)
        if what == "push":
            queue.push(name, time)
            known[name] = time
        elif what == "leave":
            queue.leave(name)
            known.pop(name, None)
        else:
            popped = queue.pop(time)
            due = [moment for moment in known.values() if moment <= time]
            assert (popped is None) == (not due)
            if popped is not None:
                assert known.pop(popped) == min(due)
        assert set(queue.waiting) == set(known)


def test_those_who_left_take_no_room() -> None:
    queue = DueQueue()
    for number in range(10_000):
        queue.push(f"r{number}", 1e9)
        queue.leave(f"r{number}")
    assert len(queue._heap) <= 65


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 100)), min_size=1, max_size=40), st.floats(0, 300)
)
def test_put_forward_after_half_of_the_target_and_ordered_by_deadline(
    made: list[tuple[float, float]], now: float
) -> None:
    promises = Promises()
    for number, (arrival, target) in enumerate(made):
        promises.waits(wanting(f"r{number}", target, arrival))
    tags = {}
    while (due := promises.take_due(now)) is not None:
        tags[due[0]] = due[1]
    assert set(tags) == {
        f"r{number}:0" for number, (at, target) in enumerate(made) if at + target / 2 <= now < at + target
    }
    assert all(tag < 0 for tag in tags.values()), "before whatever a policy says"
    for first in tags:
        for second in tags:
            a, b = (sum(made[int(name[1:-2])]) for name in (first, second))
            if a < b - 1e-3:
                assert tags[first] < tags[second]
    promises.leaves("r0:0")
    assert "r0:0" not in promises.waiting


def crowd(clients: int) -> VirtualRun:
    """One client has a backlog, and others come again and again, whose tags are smaller."""
    run = VirtualRun(max_num_seqs=64, max_num_batched_tokens=64)
    run.run([(0.0, make_request("first", 20, 3))])
    for number in range(6):
        run.add(make_request(f"heavy{number}", 60, 2, client="heavy"))
    return run


def test_newcomers_do_not_pass_a_promise_whose_time_is_short() -> None:
    run = crowd(1)
    began = run.now
    assert run.add(wanting("promised", 1.5, client="heavy"), arrival=began)
    number = 0
    while "promised:0" not in run.ttfts:
        run.add(make_request(f"light{number}", 60, 2, client=f"c{number}"))  # starts before the backlog
        number += 1
        run.step()
    assert run.ttfts["promised:0"] <= 1.5
    run.run()


def test_while_there_is_time_clients_share_fairly() -> None:
    run = crowd(1)
    assert run.add(wanting("promised", 1000.0, client="heavy"))
    assert run.add(make_request("light", 60, 2, client="light"))
    run.run()
    assert run.order.index("light:0") < run.order.index("promised:0")
    assert run.order.index("light:0") <= 3


def test_a_promise_gives_way_to_higher_classes_and_priorities_still() -> None:
    run = VirtualRun(max_num_seqs=64, max_num_batched_tokens=64)
    patient = wanting("late", 1.0, service_class=ServiceClass.BACKGROUND)
    run.add(patient, arrival=run.now)
    run.now += 0.7  # past the half of it
    run.add(make_request("normal", 60, 2))
    run.add(make_request("urgent", 60, 2, priority=-1))
    run.run()
    assert run.order == ["urgent:0", "normal:0", "late:0"]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_books_hold_whatever_comes(data: st.DataObject) -> None:
    run = VirtualRun(60, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(data.draw(st.integers(1, 25))):
        target = data.draw(st.sampled_from([None, 0.2, 1.0, 5.0]))
        kind = data.draw(st.sampled_from(list(ServiceClass)))
        made = make_request(
            f"r{number}",
            data.draw(st.integers(1, 150)),
            data.draw(st.integers(1, 6)),
            client=data.draw(st.sampled_from("ab")),
            service_class=kind,
            targets=ServiceTargets(ttft_seconds=target),
        )
        run.add(made)
        if data.draw(st.booleans()):
            run.scheduler.abort([f"r{data.draw(st.integers(0, number))}:0"])
        if data.draw(st.booleans()):
            run.step()
        run.scheduler.check_integrity()
    run.run()
    assert not run.scheduler._promises.waiting
    assert not run.scheduler._promises._deadlines
