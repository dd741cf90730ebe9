"""What was recorded happens again; what does not is found, and named with its step and request."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cli.main import run
from jaxserve.errors import ConfigError, OverloadedError
from jaxserve.recording.event_reader import open_recording
from jaxserve.recording.event_writer import EventWriter
from jaxserve.recording.events import Step, Submit
from jaxserve.recording.recorded_engine import RecordedEngine
from jaxserve.recording.recorded_workload import recorded_traffic
from jaxserve.recording.replay import ReplayedEngine, ReplayReport, replay_events
from jaxserve.request import GenerationRequest, SamplingParams
from jaxserve.scheduler.output import DraftRequest
from tests.fakes import OracleProposer
from tests.recording.hand_engine import VOCAB, HandRunner, Setup, run_at_random

CRAMPED = Setup(60, host_tier=True, changes={"max_waiting": 6})


def record(path: Path, setup: Setup, seed: int, count: int = 12) -> RecordedEngine:
    rng = random.Random(seed)
    engine = setup.recorded(path, rng)
    run_at_random(engine, rng, count)
    engine.check_integrity()
    engine.close()
    return engine


def replayed(path: Path, setup: Setup) -> ReplayReport:
    engine = setup.make(ReplayedEngine)
    report = replay_events(engine, open_recording(path).events())
    engine.check_integrity()
    return report


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from([52, 60, 300]),
    overlap=st.booleans(),
    scheduler=st.sampled_from(["continuous", "continuous", "static"]),
    caching=st.booleans(),
    host_tier=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_recording_replays_without_a_difference(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    blocks: int,
    overlap: bool,
    scheduler: str,
    caching: bool,
    host_tier: bool,
) -> None:
    path = tmp_path_factory.mktemp("replay") / "r.jsonl"
    changes = {
        "overlap": overlap and scheduler != "static",
        "scheduler": scheduler,
        "enable_prefix_caching": caching,
        "max_waiting": 6,
        "seed": seed % 7,
    }
    setup = Setup(blocks, host_tier and scheduler != "static", changes)
    record(path, setup, seed)
    report = replayed(path, setup)
    assert report.difference is None, str(report.difference)
    assert report.is_whole
    assert report.steps == sum(line.get("event") == "step" for line in lines_of(path))
    assert report.requests == 12


def test_the_recordings_hold_what_makes_replay_hard(tmp_path: Path) -> None:
    """Otherwise the test above would prove little."""
    seen = {"preempted": 0, "refused": 0, "aborts": 0, "copies": 0, "tokens": 0, "out": 0, "in": 0}
    setup = Setup(52, True, {"max_waiting": 12})
    for seed in range(4):
        record(tmp_path / "r.jsonl", setup, seed, count=30)
        assert replayed(tmp_path / "r.jsonl", setup).difference is None
        for line in lines_of(tmp_path / "r.jsonl"):
            plan = line.get("plan") or {}
            seen["preempted"] += len(plan.get("preempted", ()))
            seen["copies"] += len(plan.get("block_copies", ()))
            seen["out"] += len(plan.get("swap_out", ()))
            seen["in"] += len(plan.get("swap_in", ()))
            seen["refused"] += "refused" in line
            seen["aborts"] += line.get("event") == "abort"
            seen["tokens"] += len((line.get("result") or {}).get("tokens", ()))
    assert min(seen.values()) > 0, seen


def changed_step(
    lines: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]
) -> tuple[int, dict[str, Any]]:
    """(number of the step, its line) of the first step behind the middle for which something holds."""
    steps = [line for line in lines if line.get("event") == "step"]
    for number in range(len(steps) // 2, len(steps)):
        if holds(steps[number]):
            return number, steps[number]
    raise AssertionError("no such step")


@pytest.mark.parametrize("field", [0, 1, 2, 3, 4])
def test_a_changed_decision_is_found_where_it_is(tmp_path: Path, field: int) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 3)
    lines = lines_of(path)
    step, line = changed_step(lines, lambda line: bool(line.get("plan")) and bool(line["plan"]["rows"]))
    row = line["plan"]["rows"][-1]
    name = row[0]
    row[field] = "nobody:0" if field == 0 else [3] if field == 4 else row[field] + 1
    write_lines(path, lines)
    difference = replayed(path, CRAMPED).difference
    assert difference is not None
    assert (difference.step, difference.event) == (step, line["number"])
    assert difference.request in (name, "nobody:0")
    assert "recorded was" in str(difference) or "where nobody:0 was" in str(difference)


@pytest.mark.parametrize("what", ["token", "missing token", "bucket", "preempted", "no plan", "no result"])
def test_a_changed_result_or_shape_is_found_where_it_is(tmp_path: Path, what: str) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 4)
    lines = lines_of(path)
    step, line = changed_step(
        lines, lambda line: bool(line.get("plan")) and bool((line.get("result") or {}).get("tokens"))
    )
    request = next(iter(sorted(line["result"]["tokens"])))
    if what == "token":
        line["result"]["tokens"][request][0] += 1
    elif what == "missing token":
        del line["result"]["tokens"][request]
    elif what == "bucket":
        line["plan"]["bucket"][0] += 1
    elif what == "preempted":
        line["plan"]["preempted"] = ["q0:0"]
    else:
        del line["plan" if what == "no plan" else "result"]
    write_lines(path, lines)
    difference = replayed(path, CRAMPED).difference
    assert difference is not None
    assert difference.step == step
    if "token" in what:
        assert difference.request == request


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_changed_logprob_is_found_where_it_is(tmp_path: Path, place: int) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 4)
    lines = lines_of(path)
    step, line = changed_step(lines, lambda line: bool((line.get("result") or {}).get("logprobs")))
    request = min(line["result"]["logprobs"])
    line["result"]["logprobs"][request][0][place] += 1
    write_lines(path, lines)
    difference = replayed(path, CRAMPED).difference
    assert difference is not None
    assert (difference.step, difference.request) == (step, request)
    assert "logprobs[0]" in str(difference)


def test_those_turned_away_by_the_quick_check_are_traffic_too(tmp_path: Path) -> None:
    """Each once, however often it was tried, and whether it was taken in the end or not. A replay passes them by."""
    path = tmp_path / "r.jsonl"
    setup = Setup(60, changes={"max_waiting": 2, "max_num_seqs": 2})
    rng = random.Random(2)
    engine = setup.recorded(path, rng)
    requests = [GenerationRequest(f"q{i}", (5, 6, 7 + i), SamplingParams(max_tokens=4)) for i in range(6)]
    for request in requests[:4]:
        engine.submit(request)
    for _ in range(3):
        for request in requests[4:]:
            with pytest.raises(OverloadedError):
                engine.check_admission(request, 1000.5)
    while engine.has_work():
        engine.step()
    engine.check_admission(requests[4], 1001.0)
    engine.submit(dataclasses.replace(requests[4], is_promised=True))
    while engine.has_work():
        engine.step()
    engine.close()
    assert replayed(path, setup).difference is None
    recording = open_recording(path)
    traffic = recorded_traffic("r", recording.events(), recording.header.engine.buckets())
    prompts = [request.prompt_token_ids for request in traffic.workload.requests]
    assert sorted(prompts) == sorted(request.prompt_token_ids for request in requests)


def test_another_seed_is_found_in_the_first_step_that_draws_from_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 5)
    other = Setup(CRAMPED.num_blocks, True, {**CRAMPED.changes, "seed": 1})
    difference = replayed(path, other).difference
    assert difference is not None
    assert "seed is" in difference.what
    assert difference.request is not None


@pytest.mark.parametrize(
    "setup",
    [
        Setup(51, True, CRAMPED.changes),
        Setup(CRAMPED.num_blocks, True, {**CRAMPED.changes, "max_num_seqs": 3}),
        Setup(CRAMPED.num_blocks, True, {**CRAMPED.changes, "max_prefill_chunk": 3}),
        Setup(CRAMPED.num_blocks, True, {**CRAMPED.changes, "max_waiting": 1}),
    ],
)
def test_another_engine_does_something_else(tmp_path: Path, setup: Setup) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 6, count=20)
    assert replayed(path, setup).difference is not None


def test_a_model_that_answers_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 7)
    read = HandRunner.read
    calls = 0

    def misread(self: HandRunner, step: Any) -> Any:
        nonlocal calls
        calls += 1
        result = read(self, step)
        if calls == 9:
            result.sampled_token_ids = {
                k: [(t + 1) % 97 for t in v] for k, v in result.sampled_token_ids.items()
            }
        return result

    monkeypatch.setattr(HandRunner, "read", misread)
    difference = replayed(path, CRAMPED).difference
    assert difference is not None
    assert re.match(r"tokens \[\d+\], recorded were \[\d+\]", difference.what)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 8)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 40, len(whole) // 2):
        path.write_bytes(whole[:size])
        report = replayed(path, CRAMPED)
        assert report.difference is None
        assert not report.is_whole
    assert report.steps > 3


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda lines: [*lines[:5], b"{broken", *lines[6:]], ["line 6"]),
        (lambda lines: [*lines[:5], *lines[6:]], ["line 6", "missing"]),
        (lambda lines: [*lines[:5], lines[5].replace(b'"event":"', b'"event":"x'), *lines[6:]], ["line 6"]),
        (
            lambda lines: [lines[0].replace(b'"num_blocks":60', b'"num_blocks":"many"'), *lines[1:]],
            ["line 1"],
        ),
        (
            lambda lines: [lines[0].replace(b'recording":2', b'recording":9'), *lines[1:]],
            ["line 1", "version 9"],
        ),
        (lambda lines: lines[1:], ["not a recording"]),
        (lambda lines: [], ["not a recording"]),
    ],
)
def test_damage_is_named_with_its_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[list[bytes]], list[bytes]],
    mentions: list[str],
) -> None:
    path = tmp_path / "r.jsonl"
    record(path, CRAMPED, 9)
    path.write_bytes(b"".join(line + b"\n" for line in damage(path.read_bytes().splitlines())))
    with pytest.raises(ConfigError) as error:
        replayed(path, CRAMPED)
    for text in (str(path), *mentions):
        assert text in str(error.value)
    assert run(["replay", str(path), "--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("where", ["launch", "is_done", "read"])
def test_a_step_that_failed_fails_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, recovers: bool
) -> None:
    """And what follows is the same: the rest of the run, or the engine's death."""
    path = tmp_path / "r.jsonl"
    setup = Setup(60, True, {"max_waiting": 6, "overlap": True})
    engine = setup.recorded(path, random.Random(0))
    works = getattr(HandRunner, where)
    calls = 0

    def failing(self: HandRunner, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is gone")
        return works(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HandRunner, where, failing)
        if not recovers:
            patch.setattr(HandRunner, "rebuild_state", lambda self: 1 / 0)
        with nullcontext() if recovers else pytest.raises(ZeroDivisionError):
            run_at_random(engine, random.Random(1), 8)
    engine.close()
    steps = [event for event in open_recording(path).events() if isinstance(event, Step)]
    failed = [index for index, step in enumerate(steps) if step.fault is not None]
    assert len(failed) == 1
    assert steps[failed[0]].fault == (where, "RuntimeError: the device is gone")
    assert (failed[0] == len(steps) - 1) != recovers
    report = replay_events(setup.make(ReplayedEngine), open_recording(path).events())
    assert report.difference is None, report.difference


class DeviceDrafts(OracleProposer):
    """Runs on the device, which fails at some calls, the first of them number 1."""

    uses_device = True

    def __init__(self, failing: Sequence[int] = ()) -> None:
        super().__init__(VOCAB)
        self._failing = failing
        self._calls = 0

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        self._calls += 1
        if self._calls in self._failing:
            raise RuntimeError("the device is gone")
        return super().propose(wanted)


@pytest.mark.parametrize("failing", [(), (3, 6)])
def test_an_engine_that_speculates(tmp_path: Path, failing: Sequence[int]) -> None:
    """Drafts that the device fails at fail again, and what is learned of steps is what the engine has learned."""
    path = tmp_path / "r.jsonl"
    setup = Setup(60, True, {"speculative": "self:1", "num_speculative_tokens": 3})
    engine = setup.recorded(path, random.Random(0), proposer=DeviceDrafts(failing))
    for index in range(6):
        params = SamplingParams(max_tokens=20, ignore_eos=True, speculative_tokens=3)
        engine.submit(GenerationRequest(f"q{index}", tuple(range(3 + index, 20)), params))
        engine.step()
    while engine.has_work():
        engine.step()
    engine.close()
    assert engine.stats.step_failures == len(failing)
    assert engine.stats.speculation.draft_tokens > 10
    again = setup.make(ReplayedEngine, proposer=DeviceDrafts())
    report = replay_events(again, open_recording(path).events())
    assert report.difference is None, report.difference
    recording = open_recording(path)
    learned = recorded_traffic("r", recording.events(), recording.header.engine.buckets()).step_times
    assert [work for work, _ in learned._recent] == [work for work, _ in engine.step_times._recent]


def test_a_recording_replaces_only_a_recording(tmp_path: Path) -> None:
    other = tmp_path / "answers.jsonl"
    other.write_text('{"custom_id": "a"}\n')
    with pytest.raises(ConfigError, match=r"answers\.jsonl"):
        EventWriter(other)
    assert other.read_text()
    with pytest.raises(ConfigError):
        EventWriter(tmp_path / "missing" / "r.jsonl")
    record(tmp_path / "r.jsonl", CRAMPED, 1)
    record(tmp_path / "r.jsonl", CRAMPED, 2)
    assert replayed(tmp_path / "r.jsonl", CRAMPED).difference is None


def test_a_full_file_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    rng = random.Random(1)
    engine = CRAMPED.recorded(path, rng)
    assert engine._recording.events is not None
    engine._recording.events._left = 5000
    run_at_random(engine, rng, 12)
    engine.close()
    assert replayed(path, CRAMPED).difference is None
    assert "full" in caplog.text or path.stat().st_size > 5000


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replay_learns_the_same_step_times_to_the_last_bit(tmp_path: Path, overlap: bool) -> None:
    """The clock that decides is the recorded one, value for value."""
    path = tmp_path / "r.jsonl"
    setup = Setup(60, True, {"max_waiting": 6, "overlap": overlap})
    recorded = record(path, setup, 13)
    engine = setup.make(ReplayedEngine)
    assert replay_events(engine, open_recording(path).events()).difference is None
    assert recorded.step_times.is_ready
    assert engine.step_times.to_dict() == recorded.step_times.to_dict()


def test_what_is_recorded_is_the_traffic(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    setup = Setup(300, changes={"max_waiting": 100})
    record(path, setup, 11)
    recording = open_recording(path)
    traffic = recorded_traffic("r", recording.events(), recording.header.engine.buckets())
    submitted = [event for event in recording.events() if isinstance(event, Submit) and event.refused is None]
    assert len(traffic.workload.requests) == len(submitted)
    assert traffic.workload.requests[0].arrival == 0
    assert {r.prompt_token_ids for r in traffic.workload.requests} == {
        e.request.prompt_token_ids for e in submitted
    }
    assert traffic.step_times.is_ready
    ttfts = [ttft for ttft in traffic.ttfts if ttft is not None]
    assert ttfts
    assert min(ttfts) > 0.009  # a step of the clock takes at least that
