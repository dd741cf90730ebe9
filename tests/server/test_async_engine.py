from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from jaxserve.errors import EngineDeadError, QueueFullError
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from jaxserve.server.async_engine import MAX_JOINED_OUTPUTS, AsyncEngine, OutputStream
from jaxserve.server.circuit_breaker import BreakerLimits, CircuitBreaker
from jaxserve.tokenizer import Tokenizer
from tests.server.copy_engine import CopyEngine


@dataclass
class Seen:
    """An observer that remembers."""

    ends: list[str] = field(default_factory=list)

    def finished(self, reason: str, seconds: float) -> None:
        self.ends.append(reason)


@pytest.fixture
def core(tokenizer: Tokenizer) -> Iterator[CopyEngine]:
    engine = CopyEngine(tokenizer, max_running=4)
    yield engine
    engine.may_step.set()


def make(
    name: str, max_tokens: int = 5, *, n: int = 1, stream: bool = True, prompt: str = "abc"
) -> GenerationRequest:
    ids = tuple(ord(char) - 33 + 17 for char in prompt)
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return GenerationRequest(request_id=name, prompt_token_ids=ids, params=params, stream=stream)


def run(
    core: CopyEngine, body: Callable[[AsyncEngine], Awaitable[None]], seen: Seen | None = None
) -> AsyncEngine:
    """Run `body` with a started engine, and stop that afterwards."""
    holder: list[AsyncEngine] = []

    async def main() -> None:
        engine = AsyncEngine(core, CircuitBreaker(BreakerLimits(), time.monotonic), observer=seen)
        holder.append(engine)
        engine.start()
        try:
            await asyncio.wait_for(body(engine), 30)
        finally:
            core.may_step.set()
            await engine.stop()

    asyncio.run(main())
    return holder[0]


async def drain(stream: OutputStream) -> list[RequestOutput]:
    outputs = []
    while news := await stream.next():
        outputs += news
    return outputs


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


def test_every_token_arrives_once_and_in_order(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        async def one(number: int) -> None:
            request = make(f"r{number}", 1 + number % 7, prompt="hello"[: 1 + number % 5])
            tokens: list[int] = []
            ends = 0
            async for output in engine.generate(request):
                tokens += output.token_ids
                ends += output.finish_reason is not None
            prompt = request.prompt_token_ids
            assert tokens == [prompt[i % len(prompt)] for i in range(request.params.max_tokens or 0)]
            assert ends == 1

        await asyncio.gather(*(one(number) for number in range(64)))

    seen = Seen()
    run(core, body, seen)
    assert seen.ends == ["length"] * 64
    first, later = core.stats.requests.first_token, core.stats.requests.between_tokens
    assert first.count == 64
    assert first.count + later.count == sum(1 + number % 7 for number in range(64))


def test_a_reader_that_was_away_gets_joined_deltas_of_limited_size(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        with engine.open([make("slow", 500)]) as slow, engine.open([make("quick", 500)]) as quick:
            assert sum(len(output.token_ids) for output in await drain(quick)) == 500
            await until(lambda: slow.is_done)
            outputs = await drain(slow)
            assert sum(len(output.token_ids) for output in outputs) == 500
            assert max(len(output.token_ids) for output in outputs) <= MAX_JOINED_OUTPUTS
            assert len(outputs) < 20
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
            assert outputs[-1].num_output_tokens == 500

    run(core, body)


@pytest.mark.parametrize("phase", ["in the inbox", "waiting", "running"])
def test_closing_a_stream_aborts_it_in_every_phase(core: CopyEngine, phase: str) -> None:
    seen = Seen()

    async def body(engine: AsyncEngine) -> None:
        others = [engine.open([make(f"other{i}", 1000)]) for i in range(4 if phase == "waiting" else 0)]
        core.step_seconds = 0.005
        if phase == "in the inbox":
            core.may_step.clear()
            others.append(engine.open([make("holds the step", 1000)]))
            await until(lambda: "holds the step" in core.submitted)
            await asyncio.sleep(0.05)
        stream = engine.open([make("mine", 1000, n=2)])
        if phase != "in the inbox":
            await stream.admitted()
        if phase == "running":
            await stream.next()
        stream.close()
        stream.close()
        core.may_step.set()
        await until(lambda: core.aborted == ["mine"])
        for other in others:
            other.close()
        await until(lambda: not core.has_work())
        assert engine.num_open == 0

    run(core, body, seen)
    assert seen.ends.count("abort") >= 2


def test_leaving_an_iteration_early_aborts(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        generator = engine.generate(make("mine", 100_000))
        async for _ in generator:
            break
        await generator.aclose()
        await until(lambda: core.aborted == ["mine"])

    run(core, body)


def test_cancelling_a_reader_aborts(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        async def read() -> None:
            async for _ in engine.generate(make("mine", 100_000)):
                pass

        task = asyncio.create_task(read())
        await until(lambda: core.submitted == ["mine"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: core.aborted == ["mine"])

    run(core, body)


def test_all_prompts_of_a_request_or_none(core: CopyEngine) -> None:
    core.max_waiting = 2

    async def body(engine: AsyncEngine) -> None:
        core.step_seconds = 0.01
        with engine.open([make(f"r{i}", 100) for i in range(7)]) as stream:
            with pytest.raises(QueueFullError):
                await stream.admitted()
            with pytest.raises(QueueFullError):
                await stream.next()
        await until(lambda: not core.has_work())
        assert sorted(core.aborted) == sorted(core.submitted)

    run(core, body)


def test_a_dead_engine_ends_every_stream_and_takes_nothing(core: CopyEngine) -> None:
    seen = Seen()

    async def body(engine: AsyncEngine) -> None:
        core.step_seconds = 0.005
        streams = [engine.open([make(f"r{i}", 100_000)]) for i in range(8)]
        for stream in streams:
            await stream.admitted()
        core.fail_with = RuntimeError("device lost")
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await drain(stream)
            stream.close()
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            engine.open([make("late")])

    run(core, body, seen)
    assert core.closed
    assert seen.ends == ["error"] * 8


def test_what_had_ended_before_a_death_is_delivered(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.open([make("done", 3)])
        await until(lambda: stream.is_done)
        with engine.open([make("kills", 10)]) as other:
            core.fail_with = RuntimeError("device lost")
            with pytest.raises(EngineDeadError):
                await drain(other)
        assert sum(len(output.token_ids) for output in await drain(stream)) == 3
        stream.close()

    run(core, body)


def test_failing_all_aborts_them(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        core.step_seconds = 0.005
        with engine.open([make("mine", 100_000)]) as stream:
            await stream.admitted()
            engine.fail_all(EngineDeadError("shutting down"))
            with pytest.raises(EngineDeadError, match="shutting down"):
                await drain(stream)
        await until(lambda: core.aborted == ["mine"])
        assert engine.is_alive

    run(core, body)


def test_an_idle_engine_sleeps(core: CopyEngine) -> None:
    """No polling: the thread uses no processor time while there is nothing to do."""

    async def body(engine: AsyncEngine) -> None:
        async for _ in engine.generate(make("before", 3)):
            pass
        thread = next(t for t in threading.enumerate() if t.name == "jaxserve-engine")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before = time.clock_gettime(clock)
        await asyncio.sleep(0.5)
        assert time.clock_gettime(clock) - before < 0.05
        async for _ in engine.generate(make("after", 3)):
            pass

    run(core, body)


def test_a_request_that_does_not_stream_wakes_its_reader_once(core: CopyEngine) -> None:
    async def body(engine: AsyncEngine) -> None:
        with engine.open([make("mine", 50, stream=False)]) as stream:
            outputs = await stream.next()
            assert [len(output.token_ids) for output in outputs] == [50]
            assert await stream.next() == []

    run(core, body)
