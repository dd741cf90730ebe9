"""Serving begins with a few programs, while the rest is made in the background."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import GenerationDefaults
from jaxserve.device.programs import ProgramKey, essential_keys
from jaxserve.engine import EngineCore
from jaxserve.errors import EngineDeadError
from jaxserve.progress import NullProgress
from jaxserve.server.async_engine import AsyncEngine
from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from tests.device.driver import BUCKETS, CONFIG, MODEL, NUM_BLOCKS, make_runner
from tests.engine_harness import Outcome, Outcomes, ask, run
from tests.server import http
from tests.server_process import ServerProcess
from tests.text_models import smollm2

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TOTAL = len(BUCKETS.all_buckets())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executables")


def early_engine(cache: Path, before: Callable[[ProgramKey], None]) -> EngineCore:
    """An engine over a runner that has only what it needs; `before` runs ahead of every further program."""
    runner = make_runner(cache_directory=cache)
    essential = set(essential_keys(BUCKETS, swaps=False))
    make = runner._executables._make_one

    def gated(key: ProgramKey) -> Any:
        if key not in essential:
            before(key)
        return make(key)

    runner._executables._make_one = gated
    runner.warm_up(NullProgress(), wait_for_all=False)
    return EngineCore(
        model_name="tiny",
        config=CONFIG,
        model_config=MODEL,
        generation=GenerationDefaults(),
        tokenizer=smollm2(),
        runner=runner,
        buckets=runner.buckets,
        num_blocks=NUM_BLOCKS,
    )


def some_requests() -> list[Any]:
    prompts = [[1 + (7 * i + j) % 200 for j in range(length)] for i, length in enumerate((3, 40, 1, 17, 70))]
    return [
        ask(f"r{i}", prompt, 9, temperature=0.8 if i % 2 else 0.0, seed=i, frequency_penalty=0.1 * i)
        for i, prompt in enumerate(prompts)
    ]


def tokens(outcomes: Outcomes) -> dict[tuple[str, int], list[int]]:
    return {key: outcome.token_ids for key, outcome in outcomes.items()}


@pytest.mark.parametrize("when", ["never", "amid", "before"])
def test_tokens_are_the_same_whichever_shapes_are_ready(cache: Path, when: str) -> None:
    may_go_on = threading.Event()
    if when == "before":
        may_go_on.set()
    reference = early_engine(cache, lambda key: None)
    wait_until(lambda: reference.stats.shapes.ready == TOTAL)  # the other finds its programs on disk
    engine = early_engine(cache, lambda key: may_go_on.wait(300) or pytest.fail("never let go"))
    try:
        if when == "before":
            wait_until(lambda: engine.stats.shapes.ready == TOTAL)
        else:
            assert (engine.stats.shapes.ready, engine.stats.shapes.total) == (2, TOTAL)
        outcomes: Outcomes = {}
        for request in some_requests():
            engine.submit(request)
            outcomes[request.request_id, 0] = Outcome()
        steps = 0
        while engine.has_work():
            for output in engine.step():
                outcomes[output.request_id, output.index].add(output)
            steps += 1
            if when == "amid" and steps == 4:
                may_go_on.set()
                wait_until(lambda: engine.stats.shapes.ready == TOTAL)
        used = {shape for shape, stats in engine.stats.by_bucket.items() if stats.steps}
        assert ((32, 8) in used) == (when != "never"), "the shape that came late"
        assert tokens(outcomes) == tokens(run(reference, some_requests()))
        assert engine.stats.serving_compilations == 0, "the background's compilations are the plan's"
        may_go_on.set()
    finally:
        may_go_on.set()
        engine.close()
        reference.close()


def fail(key: ProgramKey) -> None:
    raise MemoryError(f"no room for {key}")


@pytest.mark.parametrize("busy", [True, False])
def test_a_program_that_cannot_be_made_ends_the_engine_loudly(cache: Path, busy: bool) -> None:
    engine = early_engine(cache, fail)
    try:
        if busy:
            with contextlib.suppress(EngineDeadError):  # it may have failed by now
                engine.submit(ask("a", [1, 2, 3], 90))
        wait_until(lambda: engine._runner.failure is not None)
        assert engine.has_work(), "somebody must call step to hear of it"
        with pytest.raises(
            EngineDeadError, match="a program could not be made: MemoryError: no room for T32xS8"
        ):
            engine.step()
        with pytest.raises(EngineDeadError):
            engine.submit(ask("b", [1], 2))
    finally:
        engine.close()


def test_an_idle_server_ends_when_a_program_cannot_be_made(cache: Path) -> None:
    """Nobody asks for anything, so only the engine's own look at its background can find it."""
    engine = early_engine(cache, fail)

    async def serve() -> BaseException:
        died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        breaker = CircuitBreaker(BreakerLimits(), time.monotonic)
        bridge = AsyncEngine(engine, breaker, on_death=died.set_result)
        bridge.start()
        error = await asyncio.wait_for(died, 30)
        assert not bridge.is_alive
        await bridge.stop()
        return error

    assert "no room" in str(asyncio.run(serve()))


def gauge(url: str, name: str) -> float:
    found = re.search(
        rf"^jaxserve:{name}{{.*}} (\S+)$", http.request(url, "GET", "/metrics").body.decode(), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def test_a_cold_server_answers_while_it_compiles(tiny_checkpoint_dir: Path, tmp_path: Path) -> None:
    """Over HTTP, in a process with an empty cache; a second one finds every program that the first has made."""
    few = [{"tokens": tokens, "seqs": [min(tokens, 4)]} for tokens in (2, 8, 16, 32)]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"jaxserve_bucket_plan": 1, "shapes": few}))
    limits = ("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "256")
    flags = (*limits, "--bucket-plan", str(plan))
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    body = {
        "model": "tiny",
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    answers = []
    with ServerProcess(
        tiny_checkpoint_dir, "--served-model-name", "tiny", *flags, environment=environment
    ) as server:
        url = server.base_url
        early = gauge(url, "shapes_ready")
        answers.append(http.post(url, "/v1/completions", body).json["choices"][0]["text"])
        total = gauge(url, "shapes")
        assert 2 <= early < total
        wait_until(lambda: gauge(url, "shapes_ready") == total)
        answers.append(http.post(url, "/v1/completions", body).json["choices"][0]["text"])
        assert gauge(url, "serving_compilations_total") == 0
        assert gauge(url, "compilations_total") == len(list(tmp_path.rglob("*.bin"))), "each is compiled once"
    with ServerProcess(
        *(tiny_checkpoint_dir, "--served-model-name", "tiny", "--wait-for-programs", *flags),
        environment=environment,
    ) as server:
        url = server.base_url
        assert gauge(url, "shapes_ready") == total
        answers.append(http.post(url, "/v1/completions", body).json["choices"][0]["text"])
        assert gauge(url, "compilations_total") == 0
    assert len(set(answers)) == 1
