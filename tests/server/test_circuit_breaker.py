"""The breaker against a model of it that keeps nothing but what has happened."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.server.circuit_breaker import (
    BreakerLimits,
    BreakerOpenError,
    BreakerState,
    CircuitBreaker,
    Trial,
)

CLOSED, OPEN, HALF_OPEN = BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class BreakerMachine(RuleBasedStateMachine):
    """Whether a request passes follows from the history: when it opened, which trials were given, how they went."""

    @initialize(
        failures=st.integers(1, 4),
        share=st.sampled_from([0.5, 0.8, 1.0]),
        promises=st.integers(1, 6),
        window=st.sampled_from([1.0, 10.0]),
        first=st.sampled_from([1.0, 2.0]),
        longest=st.sampled_from([2.0, 5.0, 16.0]),
    )
    def start(
        self, failures: int, share: float, promises: int, window: float, first: float, longest: float
    ) -> None:
        self.limits = BreakerLimits(failures, share, promises, window, first, longest)
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.limits, self.clock)
        self.failures: list[bool] = []  # of steps, since it closed last
        self.tokens: list[tuple[float, int, int]] = []  # since it closed last
        self.closed = True
        self.until = 0.0
        self.length = first
        self.trials: list[tuple[Trial, bool]] = []  # and whether its verdict counts
        self.openings = 0

    def opens(self, *, during_trial: bool) -> None:
        if during_trial:
            self.length = min(2 * self.length, self.limits.max_open_seconds)
        self.closed = False
        self.openings += 1
        self.until = self.clock.now + self.length
        self.trials = [(trial, False) for trial, _ in self.trials]

    @property
    def on_trial(self) -> bool:
        return any(counts for _, counts in self.trials)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def request(self) -> None:
        if self.closed:
            self.breaker.check()
            assert self.breaker.admit() is None
        elif self.clock.now < self.until:
            for ask in (self.breaker.check, self.breaker.admit):
                with pytest.raises(BreakerOpenError) as caught:
                    ask()
                assert caught.value.retry_after_seconds == pytest.approx(self.until - self.clock.now)
                assert str(caught.value)
        else:
            self.breaker.check()
            assert self.breaker.state is (HALF_OPEN if self.on_trial else OPEN), "asking alone takes nothing"
            trial = self.breaker.admit()
            assert trial is not None
            self.trials.append((trial, True))
            self.until = self.clock.now + self.length

    @precondition(lambda self: self.trials)
    @rule(data=st.data(), succeeded=st.sampled_from([True, False, None]))
    def judge(self, data: st.DataObject, succeeded: bool | None) -> None:
        index = data.draw(st.integers(0, len(self.trials) - 1))
        trial, counts = self.trials.pop(index)
        self.breaker.judge(trial, succeeded)
        if not counts:
            return
        if succeeded:
            self.closed, self.length = True, self.limits.open_seconds
            self.failures, self.tokens = [], []
            self.trials = [(other, False) for other, _ in self.trials]
        elif succeeded is None:
            self.until = self.clock.now
            # Another trial of this opening may still be under way; it counts once a new one has begun.
            self.trials = [(other, False) for other, _ in self.trials]
        else:
            self.opens(during_trial=True)

    @rule(failed=st.booleans())
    def step(self, failed: bool) -> None:
        (self.breaker.step_failed if failed else self.breaker.step_worked)()
        self.failures.append(failed)
        if failed and self.on_trial:
            self.opens(during_trial=True)
        elif failed and self.closed:
            last = self.failures[-self.limits.failures_in_a_row :]
            if len(last) == self.limits.failures_in_a_row and all(last):
                self.opens(during_trial=False)

    @rule(kept=st.integers(0, 3), missed=st.integers(0, 3))
    def first_tokens(self, kept: int, missed: int) -> None:
        self.breaker.first_tokens(kept, missed)
        if not self.closed:
            return
        self.tokens.append((self.clock.now, kept, missed))
        recent = [entry for entry in self.tokens if entry[0] >= self.clock.now - self.limits.window_seconds]
        missing, count = sum(m for _, _, m in recent), sum(k + m for _, k, m in recent)
        enough = kept + missed > 0 and count >= self.limits.min_promises
        if enough and missing >= self.limits.missed_share * count:
            self.opens(during_trial=False)

    @invariant()
    def state_agrees(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert (self.breaker.state is CLOSED) == self.closed
        assert (self.breaker.state is HALF_OPEN) == (self.on_trial and not self.closed)
        assert self.breaker.num_openings == self.openings


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_whiles_double_up_to_the_longest_and_begin_again_after_a_good_trial() -> None:
    clock = Clock()
    breaker = CircuitBreaker(BreakerLimits(1, open_seconds=2.0, max_open_seconds=10.0), clock)
    breaker.step_failed()
    for seconds in (2.0, 4.0, 8.0, 10.0, 10.0):
        with pytest.raises(BreakerOpenError) as caught:
            breaker.admit()
        assert caught.value.retry_after_seconds == seconds
        clock.now += seconds
        trial = breaker.admit()
        assert trial is not None
        breaker.judge(trial, False)
    clock.now += 10.0
    trial = breaker.admit()
    assert trial is not None
    breaker.judge(trial, True)
    assert breaker.admit() is None
    breaker.step_failed()
    with pytest.raises(BreakerOpenError) as caught:
        breaker.admit()
    assert caught.value.retry_after_seconds == 2.0


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    breaker = CircuitBreaker(BreakerLimits(1), clock)
    breaker.step_failed()
    clock.now += 2.0
    assert breaker.admit() is not None
    with pytest.raises(BreakerOpenError):
        breaker.admit()
    assert breaker.state is HALF_OPEN
