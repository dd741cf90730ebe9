"""An EngineCore whose device is a cost model, and whose time passes only while that computes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.batch.flags import BatchFlag
from jaxserve.config import ResolvedConfig
from jaxserve.engine import EngineCore
from jaxserve.outputs import BlockTransfers, ModelRunnerOutput
from jaxserve.recording.costs_file import EngineCosts
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.scheduler.step_time import StepTimeModel, StepWork
from jaxserve.simulation.textless_outputs import TextlessOutputs
from jaxserve.tokenizer import Tokenizer

_ENOUGH_RATIOS = 5  # to say how far predictions for a shape are off
_RUN_STEPS = 32  # mean length of the runs of real steps that spreads are taken from

_NOTHING = np.zeros(0, np.int32)

StepSeconds = Callable[[StepWork], float]


class VirtualClock:
    """Time that passes when it is told to. Begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def sleep_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class NoTokenizer(Tokenizer):
    """Of an engine that nobody gives or asks for text."""

    def __init__(self) -> None: ...


class ShapeBuilder(BatchBuilder):
    """Finds a step's shape and packs nothing, since nobody computes it: half of what the host does in a step."""

    def build(self, plan: SchedulerOutput) -> HostBatch:
        rows, num_tokens = plan.scheduled, plan.num_scheduled_tokens
        bucket = self._buckets.smallest_for(num_tokens + plan.num_padding_tokens, len(rows))
        return HostBatch(bucket, _NOTHING, rows, (), (), num_tokens, BatchFlag(0))


@dataclass(frozen=True, slots=True)
class _SimulatedStep:
    """A step under way, and when it will be done."""

    plan: SchedulerOutput
    done: float


class SimulatedRunner:
    """What the engine takes for a model runner. Steps run one after the other; waiting for one moves the clock. Moving
    blocks takes time of its own, before the step that it is planned for: what a real engine hides of it is not known.

    The tokens that it samples follow from a request's seed and their positions. None ends a request.
    """

    num_compiled = 0
    serving_compilations = 0
    failure = None

    def __init__(
        self,
        clock: VirtualClock,
        step_seconds: StepSeconds,
        *,
        padding_row: int,
        vocab_size: int,
        transfer: Callable[[int, int], BlockTransfers] | None = None,
        observe: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        """`transfer`: what moving so many blocks out and in takes; None: none ever move."""
        self.padding_row = padding_row
        self._clock = clock
        self._step_seconds = step_seconds
        self._vocab_size = vocab_size
        self._transfer = transfer
        # The engine's runner moves a block there and back at its start, to measure that.
        self._moved = BlockTransfers() if transfer is None else transfer(1, 1)
        self._observe = observe
        self._free_at = 0.0  # when the device has done all that it was handed

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> _SimulatedStep:
        if self._observe is not None:
            self._observe(plan)
        self._free_at = max(self._free_at, self._clock()) + self._step_seconds(plan.work)
        if self._transfer is not None and (plan.swap_out or plan.swap_in):
            moved = self._transfer(len(plan.swap_out), len(plan.swap_in))
            self._free_at += moved.out_seconds + moved.in_seconds
            self._moved += moved
        return _SimulatedStep(plan, self._free_at)

    def is_done(self, step: _SimulatedStep) -> bool:
        return step.done <= self._clock()

    def read(self, step: _SimulatedStep) -> ModelRunnerOutput:
        self._clock.sleep_until(step.done)
        result = ModelRunnerOutput(transfers=self._moved)
        self._moved = BlockTransfers()
        for row in step.plan.scheduled:
            if row.samples:
                position = row.num_computed_tokens + row.num_scheduled_tokens
                token = (row.request.seed + 1_000_003 * position) % self._vocab_size
                result.sampled_token_ids[row.request_id] = [token]
        return result

    def rebuild_state(self) -> None: ...

    def close(self) -> None: ...


def simulated_engine(
    costs: EngineCosts,
    clock: VirtualClock,
    *,
    config: ResolvedConfig,
    num_blocks: int,
    host: HostSpace,
    transfer_rates: tuple[float, float] | None = None,
    seed: int = 0,
    observe: Callable[[SchedulerOutput], None] | None = None,
) -> EngineCore:
    """An engine with the production scheduler and accounts, whose steps take what `costs` say.

    Args:
      config: that of the costs' engine, or one that differs in what needs no other shapes.
      host: room for KV blocks in host memory; transfer_rates: bytes a second there and back, unless there is none.
      seed: of the spread of step times.
      observe: told every plan.
    """
    described = costs.engine
    buckets = described.buckets()
    runner = SimulatedRunner(
        clock,
        spread_step_seconds(costs.step_time_model(buckets.round_up), random.Random(seed)),
        padding_row=config.max_num_seqs,
        vocab_size=described.model_config.vocab_size,
        transfer=_transfer(host, transfer_rates) if host.num_blocks and transfer_rates else None,
        observe=observe,
    )
    return EngineCore(
        model_name=described.model_name,
        config=config,
        model_config=described.model_config,
        generation=described.generation,
        tokenizer=NoTokenizer(),
        outputs=TextlessOutputs(),
        runner=runner,
        buckets=buckets,
        num_blocks=num_blocks,
        host=host,
        clock=clock,
        builder=ShapeBuilder(buckets, block_size=config.block_size, padding_row=config.max_num_seqs),
    )


def _transfer(host: HostSpace, rates: tuple[float, float]) -> Callable[[int, int], BlockTransfers]:
    out_rate, in_rate = rates

    def transfer(num_out: int, num_in: int) -> BlockTransfers:
        out_bytes, in_bytes = num_out * host.block_bytes, num_in * host.block_bytes
        return BlockTransfers(out_bytes, out_bytes / out_rate, in_bytes, in_bytes / in_rate)

    return transfer


def spread_step_seconds(model: StepTimeModel, rng: random.Random) -> StepSeconds:
    """Times as the model predicts them, corrected by what real steps of that shape took, and spread as those were.

    The spread is taken from runs of consecutive steps: a machine is slow for a while and not for a step, which is what
    queues come from.
    """
    ratios = model.ratios()
    by_shape: dict[tuple[int, int], list[float]] = {}
    for shape, ratio in ratios:
        by_shape.setdefault(shape, []).append(ratio)
    overall = statistics.fmean(ratio for _, ratio in ratios) if ratios else 1.0
    bias = {
        shape: statistics.fmean(seen) if len(seen) >= _ENOUGH_RATIOS else overall
        for shape, seen in by_shape.items()
    }
    spread = [ratio / bias[shape] for shape, ratio in ratios] or [1.0]
    at = rng.randrange(len(spread))

    def step_seconds(work: StepWork) -> float:
        nonlocal at
        at = rng.randrange(len(spread)) if rng.random() < 1 / _RUN_STEPS else (at + 1) % len(spread)
        predicted = model.predict(work)
        assert predicted is not None
        return predicted * bias.get(model.round_up(work.tokens, work.seqs), overall) * spread[at]

    return step_seconds
