"""Refusing while the device works: what `submit` would say, at once, and nothing is different afterwards."""

from __future__ import annotations

import dataclasses
import random
import threading
from functools import partial
from typing import Any

import pytest

from jaxserve.errors import OverloadedError
from jaxserve.request import GenerationRequest, SamplingParams, ServiceTargets
from tests.recording.hand_engine import HandRunner, Setup, StepClock

CROWDED = Setup(num_blocks=40)


def request(name: str, ttft: float | None = None, length: int = 20, n: int = 1) -> GenerationRequest:
    prompt = tuple(random.Random(name).choices(range(90), k=length))
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=n)
    return GenerationRequest(name, prompt, params, targets=ServiceTargets(ttft, None))


def engine(**changes: Any) -> Any:
    clock = StepClock(random.Random(1))
    made = Setup(num_blocks=40, changes=changes).make(clock=clock)
    for index in range(12):
        made.submit(request(f"r{index}"))
    for _ in range(12):
        made.step()
    return made, clock


def refusal(call: Any) -> tuple[str, float | None] | None:
    try:
        call()
    except OverloadedError as error:
        return error.reason, error.retry_after_seconds
    return None


@pytest.mark.parametrize("ttft", [None, 1e-4, 0.05, 0.2, 1.0, 1000.0])
def test_it_says_what_submit_says(ttft: float | None) -> None:
    made, clock = engine()
    asked = request("new", ttft)
    now = clock.now
    first = refusal(lambda: made.check_admission(asked, now))
    assert first == refusal(lambda: made.check_admission(asked, now)), "asking changes nothing"
    then = refusal(lambda: made.submit(asked))
    assert (first is None) == (then is None)
    if first is not None and then is not None:
        assert first[0] == then[0] == "ttft_target"


def test_a_burst_is_not_promised_more_than_can_be_kept() -> None:
    """Who has passed stands before who asks next, and isn't refused any more when it is submitted."""
    made, clock = engine()
    targets = [0.02 * i for i in range(1, 500)]
    alone = next(
        t for t in targets if refusal(partial(made.check_admission, request("a", t), clock.now)) is None
    )
    made._scheduler._forget_checked()
    burst = [request(f"b{i}", 1.1 * alone) for i in range(60)]
    passed = [one for one in burst if refusal(partial(made.check_admission, one, clock.now)) is None]
    assert 0 < len(passed) < len(burst)
    for one in passed:
        made.submit(dataclasses.replace(one, is_promised=True))
    made.check_integrity()
    made.step()
    assert not made._scheduler._checked


def test_the_promised_who_never_come_are_forgotten() -> None:
    made, clock = engine()
    for index in range(40):
        refusal(partial(made.check_admission, request(f"x{index}", 1000.0), clock.now))
    waiting = made._scheduler.num_waiting
    made.step()
    made.check_integrity()
    assert made._scheduler.num_waiting <= waiting
    assert made.stats.waiting_tokens == made._scheduler._num_waiting_tokens()
    while made.has_work():
        made.step()
        made.check_integrity()


def test_a_full_queue() -> None:
    made, clock = engine(max_waiting=12, max_num_seqs=2)
    assert refusal(lambda: made.check_admission(request("a", n=2), clock.now)) is None
    assert refusal(lambda: made.check_admission(request("b", n=20), clock.now))[0] == "queue_full"  # type: ignore[index]
    assert made.stats.refusals == {"queue_full": 1}


def played(*, asks: bool) -> list[tuple[str, tuple[int, ...]]]:
    """What comes out of a busy engine that is asked, or not, before every step."""
    made, clock = engine()
    outputs: list[tuple[str, tuple[int, ...]]] = []
    for step in range(400):
        for ttft in (None, 0.01, 100.0) if asks else ():
            refusal(partial(made.check_admission, request(f"q{step}", ttft), clock.now))
        if step % 3 == 0 and step < 30:
            made.submit(request(f"s{step}"))
        if not made.has_work():
            break
        outputs += [(output.request_id, tuple(output.token_ids)) for output in made.step()]
        made.check_integrity()
    assert not made._scheduler._ttfts._expected
    assert not made._scheduler._kv._chains
    return outputs


def test_asking_changes_no_token_and_no_order() -> None:
    assert played(asks=False) == played(asks=True)


def test_a_step_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = engine()
    working, may_end = threading.Event(), threading.Event()
    read = HandRunner.read

    def slow(self: HandRunner, step: Any) -> Any:
        working.set()
        assert may_end.wait(30)
        return read(self, step)

    monkeypatch.setattr(HandRunner, "read", slow)
    thread = threading.Thread(target=made.step)
    thread.start()
    assert working.wait(30)
    assert refusal(lambda: made.check_admission(request("new", 1e-4), clock.now)) is not None
    assert refusal(lambda: made.check_admission(request("new"), clock.now)) is None
    assert thread.is_alive(), "the step had not ended"
    may_end.set()
    thread.join(30)
    made.check_integrity()
