"""With step times known exactly, predicted times to first token are close to the actual ones, whatever one waits for.

Run as a program, it prints the errors.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import OverloadedError
from jaxserve.request import Request, ServiceClass, ServiceTargets
from jaxserve.scheduler.forecast import check_promise
from jaxserve.scheduler.step_time import work_of
from jaxserve.scheduler.ttft_record import Trust, TtftRecord
from jaxserve.stats import EngineStats
from tests.fakes import make_group, make_request
from tests.scheduler.virtual_clock import VirtualRun, step_seconds

ANY = ServiceTargets(ttft_seconds=1e9)  # predicted, never refused
Arrivals = list[tuple[float, Request]]


def request(number: int, prompt: int, output: int, **kwargs: object) -> Request:
    return make_request(f"r{number}", prompt, output, targets=ANY, **kwargs)  # type: ignore[arg-type]


def idle(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """One at a time, most of them longer than a step holds."""
    run = VirtualRun(max_num_seqs=16, max_num_batched_tokens=128)
    return run, [(10.0 * i, request(i, rng.randint(5, 500), 3)) for i in range(40)]


def queue_for_budget(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """Slots for all of a burst, whose prompts fill many steps."""
    run = VirtualRun(max_num_seqs=64, max_num_batched_tokens=128)
    return run, [(0.001 * i, request(i, rng.randint(20, 60), 4)) for i in range(60)]


def long_prompts(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """Prompts of several steps, short ones among them."""
    run = VirtualRun(max_num_seqs=64, max_num_batched_tokens=128)
    return run, [(0.3 * i, request(i, rng.choice([20, 150, 400]), 4)) for i in range(60)]


def queue_for_slots(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """Short prompts, long outputs, and several times as many as there are slots."""
    run = VirtualRun(max_num_seqs=16, max_num_batched_tokens=128)
    return run, [(0.05 * i, request(i, rng.randint(5, 30), rng.randint(20, 60))) for i in range(120)]


def queue_for_blocks(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """Slots enough, but blocks for six."""
    run = VirtualRun(60, max_num_seqs=32, max_num_batched_tokens=256)
    return run, [(0.04 * i, request(i, rng.randint(100, 140), 16)) for i in range(60)]


def interactive_among_background(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """Every fifth request passes the others, and takes the place of one."""
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=128)
    classes = [ServiceClass.INTERACTIVE, *[ServiceClass.BACKGROUND] * 4]
    return run, [
        (0.04 * i, request(i, rng.randint(5, 60), 20, service_class=classes[i % 5])) for i in range(100)
    ]


def overload(rng: random.Random) -> tuple[VirtualRun, Arrivals]:
    """A bit of everything, faster than it can be served."""
    run = VirtualRun(2000, max_num_seqs=16, max_num_batched_tokens=128)
    return run, [(0.2 * i, request(i, rng.randint(5, 300), rng.randint(5, 60))) for i in range(200)]


REGIMES = [
    idle,
    queue_for_budget,
    long_prompts,
    queue_for_slots,
    queue_for_blocks,
    interactive_among_background,
    overload,
]
LARGEST_MEDIANS = [0.01, 0.1, 0.1, 0.1, 0.25, 0.25, 0.2]


def errors_of(regime: Callable[[random.Random], tuple[VirtualRun, Arrivals]]) -> list[float]:
    """Predicted / actual - 1 of each request (interactive ones alone, where there are two classes)."""
    run, arrivals = regime(random.Random(1))
    run.run(arrivals)
    asked = {r.request_id for _, r in arrivals if r.service_class is ServiceClass.INTERACTIVE}
    assert asked == asked & run.predicted.keys()
    return [run.predicted[request_id] / run.ttfts[request_id] - 1 for request_id in asked]


@pytest.mark.parametrize(("regime", "largest_median"), list(zip(REGIMES, LARGEST_MEDIANS, strict=True)))
def test_predictions_are_near(
    regime: Callable[[random.Random], tuple[VirtualRun, Arrivals]], largest_median: float
) -> None:
    assert statistics.median(abs(error) for error in errors_of(regime)) <= largest_median


def test_cached_prompts_are_predicted_as_such() -> None:
    run = VirtualRun(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=True)
    prompt = list(range(640))
    run.run(
        [
            (0.0, make_request("first", prompt, 1, targets=ANY)),
            (9.0, make_request("again", prompt, 1, targets=ANY)),
        ]
    )
    assert run.predicted["again:0"] == pytest.approx(run.ttfts["again:0"], rel=0.01)
    assert run.predicted["again:0"] < run.predicted["first:0"] / 5


# Refusals by prediction.


def crowded(**config: object) -> VirtualRun:
    run = VirtualRun(max_num_seqs=4, max_num_batched_tokens=64, **config)
    run.run([(0.0, request(1000, 20, 3))])  # so that something is known of this engine
    for number in range(12):
        run.add(make_request(f"c{number}", 20, 40))
    run.step()
    return run


def test_who_cannot_be_served_in_time_is_refused_at_once_and_comes_again_when_told() -> None:
    run = crowded()
    hasty = make_request("hasty", 20, 4, targets=ServiceTargets(ttft_seconds=0.5))
    assert not run.add(hasty)
    error = run.refused["hasty:0"]
    assert (error.reason, type(error)) == ("ttft_target", OverloadedError)
    assert error.retry_after_seconds is not None
    assert error.retry_after_seconds > 0
    assert run.stats().refusals == {"ttft_target": 1}
    until = run.now + 1.2 * error.retry_after_seconds  # it is an estimate
    while run.now < until:
        run.step()
    assert run.add(make_request("hasty", 20, 4, targets=ServiceTargets(ttft_seconds=0.5)))
    run.run()
    assert run.ttfts["hasty:0"] <= 0.6


def test_a_refused_request_leaves_no_trace() -> None:
    run = crowded(enable_prefix_caching=True)
    before = run.stats()
    for number in range(50):
        assert not run.add(
            make_request(f"h{number}", 200, 4, targets=ServiceTargets(ttft_seconds=0.01), client="h")
        )
    after = run.stats()
    assert after.refusals == {"ttft_target": 50}
    after.refusals = before.refusals
    assert after == before
    assert not [name for name in run.scheduler._kv._chains if name.startswith("h")]
    assert run.add(make_request("patient", 20, 4, client="h"))
    assert run.add(make_request("new", 20, 4, client="new"))
    tags = [run.scheduler._entries[f"{name}:0"].order[2] for name in ("patient", "new")]
    assert tags[0] == tags[1]  # its client has used nothing
    run.run()


def test_a_target_that_no_engine_could_meet_is_refused_without_a_time_to_come_again() -> None:
    run = crowded()
    run.run()
    assert not run.add(make_request("long", 3000, 4, targets=ServiceTargets(ttft_seconds=0.2)))
    assert run.refused["long:0"].retry_after_seconds == math.inf
    assert "even when nothing else is served" in str(run.refused["long:0"])


def test_time_spent_before_the_queue_counts() -> None:
    run = crowded()
    run.run()
    target = ServiceTargets(ttft_seconds=1.0)
    assert run.add(make_request("new", 20, 4, targets=target))
    assert not run.add(make_request("old", 20, 4, targets=target), arrival=run.now - 0.99)


def test_all_choices_of_a_request_are_refused_together() -> None:
    run = crowded()
    waiting = run.scheduler.num_waiting
    group = make_group("g", 20, 3, targets=ServiceTargets(ttft_seconds=0.1))
    assert not run.add(*group)
    assert run.scheduler.num_waiting == waiting
    assert run.stats().refusals == {"ttft_target": 1}


def test_interactive_requests_are_not_refused_for_background_work_that_gives_way() -> None:
    run = VirtualRun(max_num_seqs=4, max_num_batched_tokens=64)
    run.run([(0.0, request(1000, 20, 3))])
    for number in range(200):
        run.add(make_request(f"b{number}", 30, 40, service_class=ServiceClass.BACKGROUND))
    run.step()
    target = ServiceTargets(ttft_seconds=0.5)
    assert not run.add(make_request("b", 20, 4, service_class=ServiceClass.BACKGROUND, targets=target))
    assert run.add(make_request("i", 20, 4, targets=target))
    run.step()
    run.step()
    assert run.ttfts["i:0"] <= 0.5


def test_the_slot_of_a_background_request_counts_as_free_to_an_interactive_one() -> None:
    run = VirtualRun(max_num_seqs=4, max_num_batched_tokens=64)
    run.run([(0.0, request(1000, 20, 3))])
    for number in range(3):
        run.add(make_request(f"i{number}", 10, 100))
    run.add(make_request("b", 10, 100, service_class=ServiceClass.BACKGROUND))
    run.step()
    assert run.add(make_request("i", 20, 4, targets=ServiceTargets(ttft_seconds=0.5)))
    run.step()
    assert run.ttfts["i:0"] <= 0.5


def test_an_engine_that_knows_nothing_refuses_nobody() -> None:
    run = crowded()
    run.scheduler._step_times.num_steps = 0
    assert run.add(make_request("hasty", 20, 4, targets=ServiceTargets(ttft_seconds=1e-3)))


def test_a_bad_estimate_does_not_shut_an_idle_engine_for_good() -> None:
    run = crowded()
    run.run()
    target = ServiceTargets(ttft_seconds=1.0)
    good, run.scheduler._step_times.weights = run.scheduler._step_times.weights, [100.0, 0.0, 0.0, 0.0, 0.0]
    assert not run.add(make_request("a", 20, 2, targets=target))
    run.now += 61
    assert run.add(make_request("b", 20, 2, targets=target))  # its steps show how long steps take
    run.scheduler._step_times.weights = good
    run.run()
    assert run.add(make_request("c", 20, 2, targets=target))


def test_predictions_are_corrected_by_what_came_of_them() -> None:
    record = TtftRecord()
    for number in range(60):
        record.expect(f"r{number}", 0, arrival=0.0, now=1.0, raw=2.0)
        record.first_token(f"r{number}", 1.0 + 6.0)
        assert not record.awaits
    assert record.trust(0, now=7.0).correction == pytest.approx(3.0, rel=0.01)
    assert record.trust(1, now=7.0) == Trust()  # the other class knows nothing of it
    assert record.trust(0, now=7.0 + 30.0).correction == pytest.approx(2.0, rel=0.01)
    record.expect("last", 0, arrival=0.0, now=1.0, raw=2.0)
    stats = EngineStats()
    record.first_token("last", 7.0)
    record.fill_stats(stats, 7.0)
    assert stats.ttft_predictions == 61
    assert stats.ttft_actual_seconds == pytest.approx(61 * 7.0)
    assert 0 < stats.ttft_error_seconds < stats.ttft_actual_seconds
    record.first_token("unknown", 9.0)
    record.forget("unknown")


@given(
    ratios=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60),
    pause=st.floats(0, 1000),
    rank=st.integers(0, 1),
)
def test_the_spread_lies_between_what_was_seen_and_what_is_typical_and_fades(
    ratios: list[float], pause: float, rank: int
) -> None:
    record = TtftRecord()
    now = 0.0
    for ratio in ratios:
        record.expect("r", rank, arrival=now, now=now, raw=1.0)
        now += ratio
        record.first_token("r", now)
    spread = record.trust(rank, now).spread
    assert 0 < spread <= max(Trust().spread, 1.5)
    faded = record.trust(rank, now + pause).spread
    assert abs(faded - Trust().spread) <= abs(spread - Trust().spread) + 1e-12
    assert record.trust(1 - rank, now) == Trust()


def test_steady_errors_leave_a_small_spread_and_wild_ones_a_large_one() -> None:
    steady, wild = TtftRecord(), TtftRecord()
    rng = random.Random(1)
    for number in range(200):
        now = 0.01 * number  # so short that nothing fades
        for record, ratio in ((steady, 1.5), (wild, rng.choice([0.5, 2.5]))):
            record.expect("r", 0, arrival=now - ratio, now=now - ratio, raw=1.0)
            record.first_token("r", now)
    assert steady.trust(0, 2.0).spread < 0.03
    assert wild.trust(0, 2.0).spread == pytest.approx(1.0, rel=0.2)


@given(
    elapsed=st.floats(0, 3),
    raw=st.floats(0, 5),
    alone_part=st.floats(0, 1),
    target=st.floats(0.01, 5),
    correction=st.floats(0.25, 4),
    spread=st.floats(0, 2),
)
def test_nobody_is_let_in_past_his_target_and_more_doubt_lets_nobody_in(
    elapsed: float, raw: float, alone_part: float, target: float, correction: float, spread: float
) -> None:
    alone = raw * alone_part
    error = refusal(elapsed, raw, alone, target, Trust(correction, spread))
    if error is None:
        assert elapsed + raw * correction <= target
        assert refusal(elapsed, raw, alone, target, Trust(correction, spread / 2)) is None
        return
    assert refusal(elapsed, raw, alone, target, Trust(correction, 2 * spread)) is not None
    wait = error.retry_after_seconds
    assert wait is not None
    assert wait > 0
    assert (wait == math.inf) == (alone * correction > target) == ("of no use" in str(error))
    if alone_part == 1:  # what is due to nobody else is not doubted
        assert elapsed + raw * correction > target


def refusal(elapsed: float, raw: float, alone: float, target: float, trust: Trust) -> OverloadedError | None:
    try:
        check_promise(elapsed, raw, alone, target, trust)
    except OverloadedError as error:
        return error
    return None


def test_the_step_under_way_counts() -> None:
    """A request is checked while a step runs; it cannot start before that is through."""
    run = VirtualRun(max_num_seqs=8, max_num_batched_tokens=64)
    run.run([(0.0, request(1000, 20, 3))])
    run.add(make_request("a", 64, 4))
    plan = run.scheduler.schedule(run.now)
    long = step_seconds(work_of(plan.scheduled))
    asked = make_request("b", 20, 4, targets=ServiceTargets(ttft_seconds=0.9 * long))
    asked.arrival_time = run.now
    with pytest.raises(OverloadedError):
        run.scheduler.check(asked, now=run.now)
    asked.arrival_time = run.now + 0.9 * long  # nearly through
    run.scheduler.check(asked, now=run.now + 0.9 * long)


def test_what_decode_stall_limits_leave_of_a_step_is_predicted() -> None:
    """Streams want a token every 60 ms, so a step computes far fewer than 128 prompt tokens."""
    run = VirtualRun(max_num_seqs=64, max_num_batched_tokens=128)
    streams = [make_request(f"s{n}", 10, 200, targets=ServiceTargets(itl_seconds=0.06)) for n in range(4)]
    run.add(*streams[:1])
    for stream in streams[1:]:
        run.add(stream)
    run.step()
    for number in range(8):
        assert run.add(request(number, 60, 2))
        if number % 2:
            run.step()
    run.run()
    errors = [run.predicted[f"r{n}:0"] / run.ttfts[f"r{n}:0"] - 1 for n in range(8)]
    assert statistics.median(abs(error) for error in errors) <= 0.15
    assert max(gap for gaps in run.gaps.values() for gap in gaps) <= 0.07


def test_what_ends_without_a_first_token_is_forgotten() -> None:
    run = crowded()
    run.add(make_request("gone", 20, 4, targets=ANY))
    run.scheduler.abort(["gone:0"])
    run.add(make_request("scored", 20, 0, targets=ANY))
    run.run()
    assert not run.scheduler._ttfts.awaits


if __name__ == "__main__":
    for regime in REGIMES:
        errors = errors_of(regime)
        absolute = sorted(abs(error) for error in errors)
        print(
            f"{regime.__name__:30} median {statistics.median(absolute):6.1%}  "
            f"P90 {absolute[int(0.9 * len(absolute))]:6.1%}  bias {statistics.median(errors):+6.1%}"
        )
