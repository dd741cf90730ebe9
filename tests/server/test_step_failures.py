"""Failing steps as clients see them: real HTTP, a real engine, a real device, and a runner that fails on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.engine import MAX_STEP_FAILURES
from jaxserve.server.app import ServerOptions
from jaxserve.server.circuit_breaker import BreakerLimits
from tests.engine_harness import ServedModel, ask, prompt_ids
from tests.server import http
from tests.server.running_server import RunningServer

COMPLETIONS = "/v1/completions"
OPEN_SECONDS = 1.0  # long enough for a busy machine to be asked a few times meanwhile


class FailingRunner:
    """The runner, of which a step fails after it has been launched (its state is lost by then) when `fails` says so.

    Attributes:
      fails: told the number of the step.
    """

    def __init__(self, model: ServedModel) -> None:
        self._runner = model.runner
        self.padding_row, self.num_compiled = model.runner.padding_row, model.runner.num_compiled
        self.failure = None
        self.is_done, self.rebuild_state = model.runner.is_done, model.runner.rebuild_state
        self.serving_compilations = 0
        self.num_steps = 0
        self.fails: Callable[[int], bool] = lambda step: False

    def launch(self, plan: Any, batch: Any) -> Any:
        return self._runner.launch(plan, batch)

    def read(self, step: Any) -> Any:
        self.num_steps += 1
        if self.fails(self.num_steps):
            raise RuntimeError("the device is on fire")
        return self._runner.read(step)

    def close(self) -> None: ...


@pytest.fixture
def runner(tiny_model: ServedModel) -> FailingRunner:
    return FailingRunner(tiny_model)


@pytest.fixture
def url(tiny_model: ServedModel, runner: FailingRunner) -> Iterator[str]:
    engine = tiny_model.engine(runner=runner)
    limits = BreakerLimits(MAX_STEP_FAILURES, open_seconds=OPEN_SECONDS)
    with RunningServer(engine, ServerOptions(), limits) as server:
        yield server.base_url


def body(name: str, length: int = 9, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(prompt_ids(name, length)),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def metric(url: str, name: str) -> float:
    lines = http.request(url, "GET", "/metrics").body.decode().splitlines()
    (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)]
    return float(value)


def test_every_running_stream_ends_with_the_right_tokens(
    tiny_model: ServedModel, runner: FailingRunner, url: str
) -> None:
    runner.fails = lambda step: step in (2, 9, 10, 17)
    cases = [
        (f"s{index}", 3 + 17 * index, 14 + index, {"seed": index, "temperature": 0.8} if index % 2 else {})
        for index in range(6)
    ]
    solos = [  # before: the device runs one thing at a time
        tiny_model.solo(ask(name, length, tokens, **fields))[0] for name, length, tokens, fields in cases
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        replies = [
            pool.submit(http.stream, url, COMPLETIONS, body(name, length, tokens, **fields))
            for name, length, tokens, fields in cases
        ]
        for solo, reply in zip(solos, replies, strict=True):
            choices = [chunk["choices"][0] for chunk in reply.result(120)]
            assert [token for choice in choices for token in choice["token_ids"]] == solo.token_ids
            assert "".join(choice["text"] for choice in choices) == solo.text
            assert choices[-1]["finish_reason"] == "length"
    assert metric(url, "jaxserve:step_failures_total") == 4
    assert metric(url, "jaxserve:circuit_breaker_openings_total") == 0
    for path in ("/health", "/ready"):
        assert http.request(url, "GET", path).status == 200


def refused(url: str) -> http.Reply:
    reply = http.post(url, COMPLETIONS, body("r"))
    assert reply.status == 503
    assert (reply.error["type"], reply.error["code"]) == ("server_error", "circuit_open")
    assert reply.headers["retry-after"] in ("1", "2", "3")  # the second while is 2 s
    return reply


def test_the_breaker_opens_tries_and_closes(tiny_model: ServedModel, runner: FailingRunner, url: str) -> None:
    (solo,) = tiny_model.solo(ask("c", 9, 20)).values()
    runner.fails = lambda step: True
    whole = http.post(url, COMPLETIONS, body("a"))
    assert (whole.status, whole.error["code"]) == (500, "generation_failed")
    assert runner.num_steps == MAX_STEP_FAILURES

    reply = refused(url)
    assert f"{MAX_STEP_FAILURES} steps failed in a row" in reply.error["message"]
    health = http.request(url, "GET", "/health")
    assert (health.status, health.json["circuit_breaker"]) == (200, "open"), "it can recover"
    ready = http.request(url, "GET", "/ready")
    assert (ready.status, ready.error["code"]) == (503, "circuit_open")
    assert int(ready.headers["retry-after"]) >= 1
    assert metric(url, 'jaxserve:circuit_breaker{model_name="tiny",state="open"}') == 1
    assert runner.num_steps == MAX_STEP_FAILURES, "nothing was tried meanwhile"

    time.sleep(OPEN_SECONDS)
    assert http.request(url, "GET", "/ready").status == 200, "one may try"
    trial = http.post(url, COMPLETIONS, {**body("b"), "stream": True})
    assert (trial.status, b'"generation_failed"' in trial.body, b"[DONE]" in trial.body) == (200, True, False)
    refused(url)
    assert metric(url, "jaxserve:circuit_breaker_openings_total") == 2

    runner.fails = lambda step: False
    time.sleep(2 * OPEN_SECONDS)
    assert http.post(url, COMPLETIONS, body("c")).json["choices"][0]["token_ids"] == solo.token_ids
    assert http.request(url, "GET", "/health").json["circuit_breaker"] == "closed"
    for name in "de":
        assert http.post(url, COMPLETIONS, body(name)).status == 200


def test_a_trial_whose_client_leaves_lets_the_next_try(runner: FailingRunner, url: str) -> None:
    runner.fails = lambda step: True
    assert http.post(url, COMPLETIONS, body("a")).status == 500
    time.sleep(OPEN_SECONDS)
    assert http.post(url, COMPLETIONS, {**body("b"), "temperature": "hot"}).status == 400, "no trial at all"
    runner.fails = lambda step: False
    assert http.post(url, COMPLETIONS, body("c")).status == 200
