"""The waiting queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.waiting_queue import QueuedWork, WaitingQueue


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 30)), max_size=200))
def test_it_is_a_sorted_list_with_removal(actions: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    model: set[int] = set()
    for action, number in actions:
        if action == "push" and number not in model:
            queue.push((0, number, 0), str(number))  # the same key again after a removal, as on preemption
            model.add(number)
        elif action == "remove" and number in model:
            queue.remove(str(number))
            model.remove(number)
        elif action == "pop" and model:
            queue.remove(str(min(model)))
            model.remove(min(model))
        assert len(queue) == len(model)
        head = queue.peek()
        assert head == (((0, min(model), 0), str(min(model))) if model else None)


def test_removed_entries_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push((0, -1, 0), "head")
    for number in range(10_000):
        queue.push((0, number, 0), str(number))
        queue.remove(str(number))
    assert sum(len(chunk.keys) for chunk in queue._chunks) == len(queue._lasts) == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=1500), st.integers(-1, 3001))
def test_the_work_ahead_of_a_place_is_that_of_all_entries_before_it(
    actions: list[tuple[bool, int]], place: int
) -> None:
    queue = WaitingQueue()
    model: set[int] = set()
    for number in range(0, 3000, 3):  # several chunks
        queue.push((0, number, 0.0, 0), str(number), number % 7, number % 5)
        model.add(number)
    for pushes, number in actions:
        if pushes and number not in model:
            queue.push((0, number, 0.0, 0), str(number), number % 7, number % 5)
            model.add(number)
        elif not pushes and number in model:
            queue.remove(str(number))
            model.remove(number)
    before = [number for number in model if number < place]
    assert queue.ahead_of((0, place, 0.0, 0)) == QueuedWork(
        len(before), sum(number % 7 for number in before), sum(number % 5 for number in before)
    )
    assert queue.total() == queue.ahead_of((1, 0, 0.0, 0))
