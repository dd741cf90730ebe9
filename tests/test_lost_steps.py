"""A request that the device always fails at ends with an error, wherever in it that is; whoever it ran with goes on."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine import MAX_LOST_STEPS
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from tests.recording.hand_engine import HandRunner, Setup

POISON = 96  # computing this token kills the step


class TouchyRunner(HandRunner):
    def launch(self, plan: Any, batch: Any) -> Any:
        for item in plan.scheduled:
            start = item.num_computed_tokens
            if POISON in item.request.prompt_token_ids[start : start + item.num_scheduled_tokens]:
                raise RuntimeError("the device is on fire")
        return super().launch(plan, batch)


def ask(name: str, prompt: list[int], max_tokens: int = 12, n: int = 1) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("host_tier", [False, True])
@pytest.mark.parametrize("place", [0, 7, 20, 59])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_that_fails_in_any_piece_ends_alone(
    overlap: bool, host_tier: bool, place: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.recording.hand_engine.HandRunner", TouchyRunner)
    setup = Setup(host_tier=host_tier, changes={"overlap": overlap})
    engine = setup.make()
    prompt = [5] * 60
    prompt[place] = POISON
    for request in (ask("early", [7, 8, 9], 40), ask("bad", prompt, n=n), ask("late", [11] * 9)):
        engine.submit(request)
    tokens: dict[str, list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    errors: dict[str, str | None] = {}
    for _ in range(400):
        if not engine.has_work():
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id, output.index] = output.finish_reason
                errors[output.request_id] = output.error
        engine.check_integrity()
    assert not engine.has_work(), "it goes on for ever"
    assert all(ends["bad", index] is FinishReason.ERROR for index in range(n))
    error = errors["bad"] or ""
    assert "the device failed at" in error
    assert "on fire" not in error, "details are for the log"
    if place == 59 or (
        place == 20 and not overlap
    ):  # steps that work come before the failing one, and are read
        assert ends["early", 0] is FinishReason.LENGTH
        assert len(tokens["early"]) == 40
    assert engine.stats.step_failures <= (n + 1) * MAX_LOST_STEPS
    assert not engine._lost._counts
    engine.submit(ask("after", [3, 4]))
    while engine.has_work():
        assert all(output.error is None for output in engine.step())
