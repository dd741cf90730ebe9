"""Who may wait, and what is too big to run at all."""

from __future__ import annotations

import pytest

from jaxserve.errors import InvalidRequestError, QueueFullError
from tests.fakes import make_group, make_request
from tests.scheduler.harness import Harness
from tests.scheduler.virtual_clock import VirtualRun


def test_the_queue_has_a_limit_and_recovers() -> None:
    harness = Harness(20, max_num_seqs=1, max_waiting=2)
    harness.add(make_request("a", 5))
    harness.step()  # runs, waits no longer
    harness.add(make_request("b", 5), make_request("c", 5))
    with pytest.raises(QueueFullError, match=r"full \(2 sequences\)"):
        harness.scheduler.add(make_request("d", 5))
    harness.drain()
    harness.run(make_request("d", 5))


def test_all_sequences_of_a_request_are_taken_or_none() -> None:
    harness = Harness(20, max_num_seqs=1, max_waiting=2)
    harness.add(make_request("a", 5))
    with pytest.raises(QueueFullError):
        harness.scheduler.add(*make_group("g", 5, 3))
    assert harness.scheduler.num_waiting == 1
    harness.scheduler.add(*make_group("g", 5, 2))
    assert harness.scheduler.num_waiting == 3
    assert harness.stats().refusals == {"queue_full": 1}
    harness.scheduler.abort(["a:0", "g:0", "g:1"])


def test_tokens_that_wait_have_a_limit_and_an_empty_queue_takes_any_request() -> None:
    harness = Harness(200, max_num_seqs=1, max_waiting_tokens=50)
    harness.add(make_request("running", 5, 20))
    harness.step()
    harness.add(make_request("huge", 300))
    with pytest.raises(
        QueueFullError, match="300 tokens wait already, at most 50, and this one has 1"
    ) as caught:
        harness.scheduler.add(make_request("tiny", 1))
    assert caught.value.reason == "queue_tokens_full"
    harness.scheduler.abort(["huge:0"])
    harness.add(make_request("a", 25), *make_group("g", 22, 3))  # choices that fork count a token each
    assert harness.stats().waiting_tokens == 25 + 22 + 1 + 1
    with pytest.raises(QueueFullError):
        harness.scheduler.add(make_request("b", 2))
    harness.add(make_request("c", 1))
    assert harness.stats().refusals == {"queue_tokens_full": 2}
    harness.drain()
    harness.check_drained()


def test_a_full_queue_says_when_there_will_be_room() -> None:
    run = VirtualRun(max_num_seqs=2, max_waiting=3, max_num_batched_tokens=32)
    for number in range(5):
        run.add(make_request(f"r{number}", 10, 20 + number))
    for _ in range(3):
        run.step()
    assert not run.add(make_request("late", 10, 20))
    retry_after = run.refused["late:0"].retry_after_seconds
    assert retry_after is not None
    came, until = run.now, run.now + retry_after
    while run.scheduler.num_waiting == 3:
        run.step()
    assert run.now - came == pytest.approx(until - came, rel=0.2)


def test_what_never_fits_is_refused_with_the_numbers_and_blocks_nobody() -> None:
    harness = Harness(64, block_size=16, max_num_batched_tokens=64)
    for prompt, output in ((1500, 1), (1000, 500), (1025, 0), (1024, 2)):
        with pytest.raises(InvalidRequestError, match="do not fit the KV cache of 1024 tokens"):
            harness.scheduler.add(make_request("big", prompt, output))
    harness.run(*(make_request(f"small{i}", 20) for i in range(10)))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["continuous", "static"])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_the_boundary_of_the_pool_is_exact(kind: str, caching: bool, max_tokens: int) -> None:
    """Every length around it is either served or refused at once; none hangs in the queue."""
    answers = []
    for length in range(5 * 4 - 8, 5 * 4 + 5):
        harness = Harness(5, block_size=4, scheduler=kind, enable_prefix_caching=caching)
        try:
            harness.run(make_request("a", length, max_tokens))
            answers.append(True)
        except InvalidRequestError:
            answers.append(False)
    assert answers == sorted(answers, reverse=True)
    assert sum(answers) == 20 - max(max_tokens - 1, 0) - 11


def test_an_id_in_use_is_refused() -> None:
    harness = Harness(20)
    harness.add(make_request("a", 5))
    with pytest.raises(ValueError, match="in use"):
        harness.scheduler.add(make_request("a", 5))
    harness.drain()
    harness.add(make_request("a", 5))  # free again after its end
    harness.drain()


def test_a_request_that_has_run_is_refused() -> None:
    harness = Harness(20)
    request = make_request("a", 5)
    harness.run(request)
    with pytest.raises(ValueError, match="not a fresh one"):
        harness.scheduler.add(request)
