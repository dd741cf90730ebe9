from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.latency_meter import LatencyMeter
from jaxserve.outputs import RequestUpdate
from jaxserve.request import FinishReason, Request
from jaxserve.request_stats import RequestStats
from jaxserve.stats import EngineStats
from tests.fakes import make_request

REASONS = st.sampled_from(FinishReason)
GAPS = st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), max_size=6)


def follow(meter: LatencyMeter, request: Request, gaps: list[tuple[float, int]]) -> int:
    """Tokens at gaps from its admission, one second after its arrival; how many."""
    now = request.scheduled_time = request.arrival_time + 1
    for gap, tokens in gaps:
        now += gap
        meter.tokens([RequestUpdate(request, [7] * tokens)], now)
    return sum(tokens for _, tokens in gaps)


@given(st.lists(st.tuples(GAPS, REASONS), min_size=1, max_size=8))
def test_phases_add_up(sequences: list[tuple[list[tuple[float, int]], FinishReason]]) -> None:
    stats = EngineStats()
    meter = LatencyMeter(stats)
    decoded = first_tokens = later_tokens = totals = 0.0
    for number, (gaps, reason) in enumerate(sequences):
        request = make_request(f"r{number}", 3, 50, arrival=10.0 * number)
        meter.add(request, promised=False)
        count = follow(meter, request, gaps)
        meter.ended(request.request_id, reason, count)
        decoded += sum(gap for gap, _ in gaps[1:])
        first_tokens += bool(gaps)
        later_tokens += sum(tokens for _, tokens in gaps[1:])
        totals += count
    seen = stats.requests
    assert seen.first_token.count == seen.prefill.count == seen.decode.count == first_tokens
    assert seen.between_tokens.count == later_tokens
    assert seen.between_tokens.total == pytest.approx(decoded)
    assert seen.decode.total == pytest.approx(decoded)
    assert seen.inference.total == pytest.approx(seen.prefill.total + seen.decode.total)
    assert seen.first_token.total == pytest.approx(seen.prefill.total + first_tokens)
    assert (seen.queue.count, seen.queue.total) == (len(sequences), pytest.approx(len(sequences)))
    assert (seen.generation_tokens.count, seen.generation_tokens.total) == (len(sequences), totals)
    assert (seen.prompt_tokens.total, seen.max_tokens.total) == (3 * len(sequences), 50 * len(sequences))


def test_a_request_counts_once_however_many_choices_it_has() -> None:
    stats = EngineStats()
    meter = LatencyMeter(stats)
    choices = [make_request("r", 3, 9, index=index, n=3) for index in range(3)]
    for choice in choices:
        meter.add(choice, promised=False)
    for choice, tokens in zip(choices, (4, 9, 2), strict=True):
        assert not stats.requests.choices.count
        meter.ended(choice.request_id, FinishReason.STOP, tokens)
    seen = stats.requests
    assert (seen.choices.count, seen.choices.total) == (1, 3)
    assert (seen.longest_generation.count, seen.longest_generation.total) == (1, 9)
    assert seen.generation_tokens.total == 15


def test_who_never_ran_has_no_phases() -> None:
    stats = EngineStats()
    meter = LatencyMeter(stats)
    request = make_request("r", 3)
    meter.add(request, promised=False)
    meter.ended(request.request_id, FinishReason.ABORT, 0)
    seen: RequestStats = stats.requests
    counted = {field.name for field in dataclasses.fields(seen) if getattr(seen, field.name).count}
    assert counted == {"prompt_tokens", "generation_tokens", "max_tokens", "choices", "longest_generation"}
