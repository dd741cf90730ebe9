"""A workload is its seed's alone, and has the rates, shares and prefixes that were asked for."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cli.main import run
from jaxserve.errors import ConfigError
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.workload.arrivals import Arrivals, Lengths
from jaxserve.workload.generator import WorkloadSpec, generate
from jaxserve.workload.reader import read_workload
from jaxserve.workload.traced_request import PromptRecipe, TokenRange, TracedRequest, Workload
from jaxserve.workload.workload_file import write_workload

EVERYTHING = WorkloadSpec(
    num_requests=400,
    arrivals=Arrivals(5.0, burstiness=2.0, on_seconds=4.0, off_seconds=2.0),
    context=512,
    background_share=0.3,
    chat_share=0.6,
    think_seconds=1.0,
    system_prompts=2,
    clients=4,
    client_skew=1.0,
    targets=ServiceTargets(1.0, 0.1),
    priorities=3,
    n_share=0.2,
    stop_share=0.2,
    sampled_share=0.5,
    abort_share=0.1,
    vocabulary=TokenRange(10, 90),
)


def count(workload: Workload, **fields: object) -> int:
    return sum(all(getattr(r, name) == value for name, value in fields.items()) for r in workload.requests)


@given(st.integers(0, 2**40))
@settings(max_examples=10)
def test_a_seed_is_a_workload(seed: int) -> None:
    spec = dataclasses.replace(EVERYTHING, num_requests=30)
    one = generate(spec, seed)
    assert one == generate(spec, seed)
    other = generate(spec, seed + 1)
    assert [r.arrival for r in one.requests] != [r.arrival for r in other.requests]
    texts = [{s.key for r in w.requests for s in r.prompt.segments} for w in (one, other)]  # type: ignore[union-attr]
    assert not texts[0] & texts[1]
    longer = generate(dataclasses.replace(spec, num_requests=40), seed)
    assert longer.requests[:30] == one.requests


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("off_seconds", [0.0, 30.0])
def test_arrivals_have_the_rate_and_the_spread(burstiness: float, off_seconds: float) -> None:
    arrivals = Arrivals(4.0, burstiness, on_seconds=20.0, off_seconds=off_seconds)
    times = list(itertools.islice(arrivals.times(random.Random(3)), 40_000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.12)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    spread = statistics.pstdev(gaps) / statistics.mean(gaps)
    if off_seconds:
        assert spread > max(burstiness, 1.0)  # pauses only ever add to it
        assert max(gaps) > 20
    else:
        assert spread == pytest.approx(burstiness, rel=0.05, abs=1e-6)


def test_lengths_are_lognormal_and_within_their_limits() -> None:
    rng = random.Random(0)
    draws = [Lengths(100, 1.0, 10, 1000).draw(rng) for _ in range(20_000)]
    assert statistics.median(draws) == pytest.approx(100, rel=0.05)
    assert (min(draws), max(draws)) == (10, 1000)
    above = sum(draw > 100 * 2.71828 for draw in draws) / len(draws)
    assert above == pytest.approx(0.159, abs=0.01)  # one sigma of a normal distribution


def test_shares_classes_and_clients_are_those_that_were_asked_for() -> None:
    workload = generate(dataclasses.replace(EVERYTHING, num_requests=5000), 1)
    total = len(workload.requests)
    assert count(workload, service_class=ServiceClass.BACKGROUND) / total == pytest.approx(0.3, abs=0.03)
    assert sum(r.n > 1 for r in workload.requests) / total == pytest.approx(0.2, abs=0.03)
    assert sum(bool(r.stop) for r in workload.requests) / total == pytest.approx(0.2, abs=0.03)
    assert sum(r.temperature > 0 for r in workload.requests) / total == pytest.approx(0.5, abs=0.03)
    assert sum(r.aborts_after is not None for r in workload.requests) / total == pytest.approx(0.1, abs=0.02)
    by_client = [count(workload, client=f"client-{i}") for i in range(4)]
    assert sum(by_client) == total
    assert by_client == sorted(by_client, reverse=True)
    assert by_client[0] / by_client[1] == pytest.approx(2, rel=0.3)
    for request in workload.requests:
        background = request.service_class is ServiceClass.BACKGROUND
        assert request.targets == (ServiceTargets() if background else EVERYTHING.targets)
        assert request.num_prompt_tokens + request.max_tokens <= 512
        assert request.priority in range(3)
        assert request.seed is not None or (request.n == 1 and request.temperature == 0)


def test_a_turn_of_a_chat_begins_with_the_turn_before_and_comes_after_a_while() -> None:
    spec = WorkloadSpec(
        num_requests=300,
        arrivals=Arrivals(2.0),
        chat_share=1.0,
        turns=5.0,
        think_seconds=4.0,
        prompt=Lengths(20, 0.5),
        output=Lengths(20, 0.5),
        clients=3,
    )
    requests = generate(spec, 7).requests
    last: dict[str, TracedRequest] = {}
    turns = 0
    for request in requests:
        assert isinstance(request.prompt, PromptRecipe)
        chat = request.prompt.segments[-1].key.partition("/said/")[0]
        if chat in last:
            turns += 1
            before = last[chat]
            assert request.prompt_token_ids[: before.num_prompt_tokens] == before.prompt_token_ids
            assert request.num_prompt_tokens > before.num_prompt_tokens + before.max_tokens
            assert request.arrival - before.arrival >= 4.0
            assert request.client == before.client
        last[chat] = request
    assert len(requests) / len(last) == pytest.approx(5, rel=0.4)
    assert turns > 150
    systems = {request.prompt_token_ids[:64] for request in requests}
    assert len(systems) == 1
    assert len({request.prompt_token_ids[64:70] for request in last.values()}) == len(last)


def test_a_workload_as_file_is_the_same_workload(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    workload = generate(EVERYTHING, 5, name="mine")
    write_workload(path, workload)
    assert read_workload(path) == workload
    assert read_workload(path, limit=7).requests == workload.requests[:7]
    given_ids = Workload("ids", (TracedRequest((3, 4), 5, 0.25, n=2, client="c", stop=("a",)),))
    write_workload(path, given_ids)
    assert read_workload(path) == given_ids


def test_a_faster_one_has_the_same_requests_sooner() -> None:
    workload = generate(EVERYTHING, 5)
    twice = workload.faster(2.0)
    assert twice.seconds == pytest.approx(workload.seconds / 2)
    assert [r.prompt for r in twice.requests] == [r.prompt for r in workload.requests]


def test_a_request_is_what_the_engine_takes() -> None:
    traced = next(r for r in generate(EVERYTHING, 2).requests if r.n > 1 and r.stop)
    request = traced.request("x", started=100.0)
    assert request.arrival_time == pytest.approx(100 + traced.arrival)
    assert request.prompt_token_ids == traced.prompt_token_ids
    assert all(10 <= token < 90 for token in request.prompt_token_ids)
    params = request.params
    assert (params.n, params.stop, params.max_tokens) == (traced.n, traced.stop, traced.max_tokens)
    assert params.ignore_eos


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests": 0},
        {"chat_share": 1.5},
        {"context": 1},
        {"clients": 0},
        {"abort_seconds": 0.0},
        {"vocabulary": TokenRange(5, 5)},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(EVERYTHING, **changes)  # type: ignore[arg-type]
    for make in (
        lambda: Arrivals(0.0),
        lambda: Arrivals(float("inf")),
        lambda: Arrivals(float("nan")),
        lambda: Arrivals(1.0, on_seconds=float("inf")),
        lambda: Arrivals(1.0, off_seconds=float("inf")),
        lambda: Lengths(float("inf"), 1.0),
        lambda: Arrivals(1.0, -1.0),
        lambda: Lengths(0, 1),
        lambda: Lengths(1, -1),
    ):
        with pytest.raises(ConfigError):
            make()


def test_the_command_writes_what_its_flags_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    flags = ["--seed", "3", "--requests", "50", "--rate", "2", "--chat-share", "0.5", "--ttft-target", "2"]
    assert run(["trace", *flags, "--output", str(one)]) == 0
    assert run(["trace", *flags, "--output", str(two)]) == 0
    assert capsys.readouterr().out.startswith("50 requests in ")
    assert one.read_bytes().splitlines()[1:] == two.read_bytes().splitlines()[1:]
    workload = read_workload(one)
    assert workload.seconds == pytest.approx(25, rel=0.5)
    assert workload.requests[0].targets == ServiceTargets(2.0)
    assert run(["trace", "--from", str(one), "--faster", "2", "--output", str(two)]) == 0
    assert read_workload(two).requests == workload.faster(2).requests
    capsys.readouterr()
    for bad in (["--rate", "0"], ["--chat-share", "2"], ["--faster", "0"], ["--from", "missing.csv"]):
        assert run(["trace", *bad, "--output", str(tmp_path / "three.jsonl")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "three.jsonl").exists()
