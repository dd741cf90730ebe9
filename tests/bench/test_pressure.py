"""`scripts/bench pressure` and `soak`: what they make of answers, and small real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.peers.answer import Answer, Fault
from jaxserve.bench.peers.client import completion_body
from jaxserve.bench.pressure.load import Plan, classed_body, requests_of
from jaxserve.bench.pressure.outcome import outcome_of
from jaxserve.bench.soak.client import End, _read
from jaxserve.bench.soak.run import Soak
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.workload.traced_request import TracedRequest

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TARGETS = ServiceTargets(ttft_seconds=1.0, itl_seconds=0.1)
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "16")
FEW_SHAPES = {"jaxserve_bucket_plan": 1, "shapes": [{"tokens": 4, "seqs": [4]}, {"tokens": 16, "seqs": [4]}]}


@pytest.fixture
def limits(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a server that has little to compile."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(FEW_SHAPES))
    return (*LIMITS, "--bucket-plan", str(plan))


def _answer(sent: float, *chunks: float, fault: Fault | None = None, ended: float | None = None) -> Answer:
    end = ended if ended is not None else (chunks[-1] if chunks else sent)
    return Answer(sent, end, tuple(chunks), len(chunks), "", fault)


def test_goodput_counts_what_was_whole_and_in_time() -> None:
    interactive, background = (TracedRequest((1,), 4, service_class=kind) for kind in ServiceClass)
    answers = [
        _answer(0.0, 0.5, 0.55, 0.6),  # good
        _answer(0.0, 1.5, 1.55, 1.6),  # late
        _answer(0.0, 0.5, 1.0, 1.5),  # slow between tokens
        _answer(0.0, 0.5, fault=Fault.BROKEN),
        _answer(0.0, fault=Fault.REFUSED, ended=0.02),
        _answer(4.0, 9.0, 9.5),  # background: whole, but after the last was sent
        _answer(0.0, 3.0, 3.5),
    ]
    items = [interactive] * 5 + [background] * 2
    outcome = outcome_of(items, answers, TARGETS, {})
    assert outcome.seconds == 4.0
    assert outcome.goodput == pytest.approx(1 / 4)
    inter, back = outcome.interactive, outcome.background
    assert (inter.sent, inter.whole, inter.refused, inter.failed, inter.good) == (5, 3, 1, 1, 1)
    assert inter.refusal_p99 == pytest.approx(0.02)
    assert (back.sent, back.whole, back.in_time, back.good) == (2, 2, 1, 2)
    assert back.ttft_most == pytest.approx(5.0)


def test_the_same_requests_with_and_without_their_classes() -> None:
    plan = Plan((1.0,), 5.0, TARGETS)
    items = requests_of(plan, 1.0, 10.0).requests
    assert {item.service_class for item in items} == set(ServiceClass)
    for item in items:
        plain, classed = completion_body("m", item), classed_body("m", item)
        assert set(plain) < set(classed)
        assert plain["prompt"] == classed["prompt"]
        is_background = item.service_class is ServiceClass.BACKGROUND
        assert (classed.get("service_tier") == "flex") == is_background
        assert ("slo_ttft_ms" in classed) != is_background


@pytest.mark.parametrize(
    ("status", "data", "streamed", "end"),
    [
        (200, b'{"choices": [{"token_ids": [1, 2]}]}', False, End.ANSWERED),
        (200, b"data: {}\n\ndata: [DONE]\n\n", True, End.ANSWERED),
        (200, b"data: {}\n\n", True, End.LOST),
        (200, b'{"choices": ', False, End.LOST),
        (429, b'{"error": {"message": "full"}}', True, End.REFUSED),
        (503, b"busy", False, End.LOST),
        (400, b'{"error": {"message": "no"}}', False, End.LOST),
        (500, b'{"error": {"message": "internal"}}', False, End.LOST),
    ],
)
def test_a_request_without_a_result_or_an_error_is_lost(
    status: int, data: bytes, streamed: bool, end: End
) -> None:
    assert _read(status, data, streamed=streamed).end is end


@pytest.mark.parametrize(
    "changes",
    [{"ends": {"lost": 1}}, {"different": 1}, {"idle": {"vllm:num_requests_waiting": 1.0}}],
)
def test_a_soak_that_finds_something_says_so(changes: dict[str, object]) -> None:
    well = {"ends": {"answered": 9}, "losses": (), "compared": 3, "different": 0, "idle": {"x": 0.0}}
    rest = {"requests": 9, "resident": ((3, 100), (9, 150)), "counts": {}}
    assert Soak(**{**well, **rest}).is_well  # type: ignore[arg-type]
    assert Soak(**{**well, **rest}).growth == 50  # type: ignore[arg-type]
    assert not Soak(**{**well, **rest, **changes}).is_well  # type: ignore[arg-type]


def test_a_small_soak(
    tiny_huggingface_dir: Path, limits: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool of less than half of what 4 requests may need at once."""
    found = tmp_path / "soak.json"
    pool = ("--num-blocks", "32", "--block-size", "16", *limits)
    counts = ("--requests", "100", "--clients", "12", "--compare", "12", "--json", str(found))
    code = main(["soak", "--model", str(tiny_huggingface_dir), *counts, "--", *pool])
    said = capsys.readouterr().out
    assert code == 0, said
    result = json.loads(found.read_text())
    assert result["compared"] == 12
    assert result["ends"]["answered"] > 60
    assert sum(result["ends"].values()) == 100
    assert any("preemptions" in name for name in result["counts"]), said


def test_a_small_pressure(
    tiny_huggingface_dir: Path, limits: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "pressure.json"
    run = ("--loads", "3", "--seconds", "1", "--json", str(found), "--plot", str(tmp_path / "p.png"))
    assert main(["pressure", "--model", str(tiny_huggingface_dir), *run, "--", *limits]) == 0
    result = json.loads(found.read_text())
    for outcomes in result["outcomes"].values():
        [one] = outcomes.values()
        for kind in ("interactive", "background"):
            counts = one[kind]
            assert counts["sent"] == counts["whole"] + counts["refused"]
            assert not counts["failed"]
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert "first come, first served" in capsys.readouterr().out
