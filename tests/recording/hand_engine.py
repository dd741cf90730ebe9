"""Engines over the model that can be computed by hand, plain, recorded and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.batch.buckets import default_buckets
from jaxserve.config import EngineConfig, GenerationDefaults
from jaxserve.engine import EngineCore
from jaxserve.errors import JaxserveError
from jaxserve.outputs import BlockTransfers
from jaxserve.recording.event_writer import EventWriter
from jaxserve.recording.recorded_engine import RecordedEngine, RecordingOptions
from jaxserve.request import GenerationRequest, SamplingParams, ServiceClass, ServiceTargets
from jaxserve.scheduler.host_tier import HostSpace
from tests.engine_harness import TINY_MODEL
from tests.fakes import FakeRunner, make_config
from tests.text_models import smollm2

VOCAB = 97
HOST_BLOCKS = 60


class HandRunner(FakeRunner):
    """`FakeRunner` behind the engine's interface; steps are as long as `ticks` says, on the clock of the test."""

    num_compiled = 0
    serving_compilations = 0
    failure = None

    def __init__(
        self, block_size: int, num_blocks: int, padding_row: int, clock: StepClock | None = None
    ) -> None:
        super().__init__(block_size, num_blocks, VOCAB, HOST_BLOCKS)
        self.padding_row = padding_row
        self._clock = clock

    def launch(self, plan: Any, batch: Any) -> Any:
        return self.run(plan)

    def is_done(self, step: Any) -> bool:
        return self._clock is None or self._clock.flip()

    def read(self, step: Any) -> Any:
        if self._clock is not None:
            self._clock.work()
            if self.num_out or self.num_in:  # times that no other run will measure
                rng = self._clock.rng
                step.transfers = BlockTransfers(1000, rng.uniform(1e-6, 1e-1), 1000, rng.uniform(1e-6, 1e-1))
        return step

    def close(self) -> None: ...


@dataclass
class StepClock:
    """A clock that moves by itself, unevenly, and faster while a step runs. Not to be repeated without its seed."""

    rng: random.Random
    now: float = 1000.0

    def __call__(self) -> float:
        self.now += self.rng.uniform(0, 1e-4)
        return self.now

    def work(self) -> None:
        self.now += self.rng.uniform(0.01, 0.05)

    def flip(self) -> bool:
        return self.rng.random() < 0.5


@dataclass(frozen=True)
class Setup:
    """What an engine is made of; the same for the recorded and the replayed one."""

    num_blocks: int = 40
    host_tier: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def make(
        self,
        kind: Callable[..., EngineCore] = EngineCore,
        *,
        clock: Callable[[], float] | None = None,
        **parts: Any,
    ) -> Any:
        config = make_config(max_model_len=200, **self.changes)
        if clock is not None:
            parts["clock"] = clock
        return kind(
            model_name="hand",
            config=config,
            model_config=TINY_MODEL,
            generation=GenerationDefaults(eos_token_ids=(2,)),
            tokenizer=smollm2(),
            runner=HandRunner(
                config.block_size,
                self.num_blocks,
                config.max_num_seqs,
                clock if isinstance(clock, StepClock) else None,
            ),
            buckets=default_buckets(config),
            num_blocks=self.num_blocks,
            host=HostSpace(HOST_BLOCKS if self.host_tier else 0, 1000),
            **parts,
        )

    def recorded(
        self, path: Path, rng: random.Random, *, costs: Path | None = None, **parts: Any
    ) -> RecordedEngine:
        options = RecordingOptions(EventWriter(path), costs, "hand", EngineConfig(record=str(path)))
        return self.make(RecordedEngine, clock=StepClock(rng), recording=options, **parts)


def random_requests(rng: random.Random, count: int) -> Iterator[GenerationRequest]:
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(20))
    for index in range(count):
        own = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30)))
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.choice([None, *range(20)]) if rng.random() < 0.9 else 190,
            temperature=rng.choice([0.0, 0.7]),
            seed=rng.choice([None, rng.getrandbits(64), -5]),
            stop=rng.choice([(), ("a", "the")]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 5]))),
            logit_bias=rng.choice([None, {3: 1.5, 5: -100.0}]),
            logprobs=rng.choice([None, 2]),
            ignore_eos=rng.random() < 0.5,
        )
        yield GenerationRequest(
            f"q{index}",
            shared[: rng.choice([0, 9, 20])] + own,
            params,
            priority=rng.choice([0, 0, 1, 2]),
            service_class=rng.choice(list(ServiceClass)),
            client=rng.choice(["", "a", "b"]),
            targets=rng.choice([ServiceTargets(), ServiceTargets(5.0, 0.2)]),
            cache_salt=rng.choice([None, "s"]),
            arrival_time=rng.choice([None, 900.0]),
            stream=rng.random() < 0.5,
        )


def run_at_random(engine: EngineCore, rng: random.Random, count: int) -> None:
    """Requests and aborts come at random until all have ended. Refusals are part of it."""
    waiting = list(random_requests(rng, count))
    sent: list[str] = []
    while waiting or engine.has_work():
        while waiting and rng.random() < 0.6:
            request = waiting.pop(0)
            sent.append(request.request_id)
            try:
                engine.submit(request)
            except JaxserveError:
                continue
        if sent and rng.random() < 0.1:
            engine.abort(rng.choice(sent))
        engine.step()
