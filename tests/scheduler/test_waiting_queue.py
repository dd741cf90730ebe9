"""The waiting queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.waiting_queue import WaitingQueue


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
