"""Reading answers and counting figures: plain data, no server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.peers.answer import Answer, Fault, read_answer
from jaxserve.bench.peers.client import Exchange, arrival_times
from jaxserve.bench.peers.figures import figures_of, merge, overlaps
from jaxserve.workload.traced_request import TracedRequest

ITEM = TracedRequest((1, 2, 3), 4)


def stream(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        for event in events
    )


def token(text: str = "a") -> dict[str, Any]:
    return {"choices": [{"text": text}], "usage": None}


def usage(prompt: int = 3, output: int = 4) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


GOOD = stream(token("a"), token("é"), token(""), token("b"), usage(), b"[DONE]")


@given(cuts=st.lists(st.integers(0, len(GOOD)), max_size=8))
def test_where_the_network_cuts_changes_nothing_but_the_times(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(GOOD)]
    received = tuple((float(end), GOOD[begin:end]) for begin, end in pairwise(edges) if begin < end)
    answer = read_answer(ITEM, Exchange(0.0, 9.0, 200, received))
    assert (answer.fault, answer.output_tokens, answer.text) == (None, 4, "aéb")
    ends = [
        GOOD.index(text) + len(text) for text in (b'"a"}], "usage": null}\n', b'\\u00e9"}], "usage": null}\n')
    ]
    # An event counts from the moment its last byte is there.
    assert list(answer.chunks[:2]) == [min(edge for edge in edges if edge >= end) for end in ends]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (stream(token(), usage(output=1), b"[DONE]"), Fault.WRONG_COUNT),
        (stream(token(), usage(output=5), b"[DONE]"), Fault.WRONG_COUNT),
        (stream(token(), usage(prompt=4), b"[DONE]"), Fault.WRONG_PROMPT),
        (stream(token(), b"[DONE]"), Fault.NO_USAGE),
        (stream(token(), {"choices": [], "usage": {"prompt_tokens": "3"}}, b"[DONE]"), Fault.NO_USAGE),
        (stream(token(), usage()), Fault.BROKEN),
        (b"", Fault.BROKEN),
        (stream(token(), b"{oops", usage(), b"[DONE]"), Fault.BROKEN),
        (stream(token(), b"[1]", usage(), b"[DONE]"), Fault.BROKEN),
        (stream(token(), {"error": {"message": "no"}}, b"[DONE]"), Fault.ERROR_EVENT),
    ],
)
def test_what_a_peer_did_wrong_is_named(data: bytes, fault: Fault) -> None:
    answer = read_answer(ITEM, Exchange(0.0, 1.0, 200, ((0.5, data),)))
    assert answer.fault is fault
    assert answer.detail


def test_tokens_of_an_answer_without_usage_are_its_chunks() -> None:
    answer = read_answer(ITEM, Exchange(0.0, 1.0, 200, ((0.5, stream(token(), token())),), broken="cut"))
    assert (answer.fault, answer.output_tokens) == (Fault.BROKEN, 2)


def test_figures_by_hand() -> None:
    answers = (
        Answer(0.0, 4.0, (1.0, 2.0, 4.0), 3, "abc"),
        Answer(2.5, 3.5, (3.5,), 1, "d"),
        Answer(3.0, 3.6, (), 0, "", Fault.REFUSED, "no"),
    )
    figures = figures_of(answers)
    assert (figures.seconds, figures.output_throughput) == (4.0, 1.0)
    assert figures.ttft_p50 == pytest.approx(1.0)
    assert (figures.inter_token_p50, figures.tokens_per_chunk) == (1.5, 1.0)
    assert figures.inter_token_arriving_p99 == 2.0  # only the gap from 2 to 4 meets one that waits
    assert (figures.whole, figures.requests) == (2, 3)
    nothing = figures_of(answers[2:])
    assert (nothing.ttft_p50, nothing.inter_token_p99, nothing.latency_p99) == (None, None, None)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (float(min(pair)), float(max(pair)))),
    max_size=8,
)


@given(gaps=INTERVALS, waits=INTERVALS)
def test_gaps_that_meet_a_wait_are_those_that_share_time_with_one(
    gaps: list[tuple[float, float]], waits: list[tuple[float, float]]
) -> None:
    gaps = [(begin, end) for begin, end in gaps if begin < end]
    waits = [(begin, end) for begin, end in waits if begin < end]
    expected = [any(begin < end2 and begin2 < end for begin2, end2 in waits) for begin, end in gaps]
    assert overlaps(gaps, merge(waits)) == expected


@given(count=st.integers(1, 50), seed=st.integers(0, 5), rate=st.sampled_from([0.5, 20.0]))
def test_arrivals_are_the_seed_s(count: int, seed: int, rate: float) -> None:
    times = arrival_times(count, rate=rate, seed=seed)
    assert times == arrival_times(count, rate=rate, seed=seed)
    assert (len(times), times[0]) == (count, 0.0)
    assert all(one <= other for one, other in pairwise(times))
    # The same process, only faster or slower; and a longer one begins as a shorter one does.
    np.testing.assert_allclose(np.array(times) * rate, arrival_times(count, rate=1.0, seed=seed), rtol=1e-9)
    assert arrival_times(count + 5, rate=rate, seed=seed)[:count] == pytest.approx(times)


def test_arrivals_come_at_the_rate_that_was_asked_for() -> None:
    assert arrival_times(3, rate=None, seed=0) == (0.0, 0.0, 0.0)
    assert arrival_times(20_000, rate=4.0, seed=1)[-1] == pytest.approx(5_000, rel=0.05)
