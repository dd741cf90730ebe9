"""How a step's time grows: with the running sequences, with their contexts, and with the queue behind them.

The first two are the real programs of decode steps that the real scheduler planned, beside the least that the device
could take (see `costs.DecodeStep`) at measured rates. The third is the host's part alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean

import jax
import jax.numpy as jnp

from jaxserve.batch.buckets import default_buckets
from jaxserve.bench.costs import decode_step
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.machine_rates import MachineRates, measure_rates
from jaxserve.bench.step_batches import HostSteps, blocks_for, make_batches, requests_of
from jaxserve.bench.step_programs import load_step_programs, time_in_turn
from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from jaxserve.errors import ConfigError
from jaxserve.model_store import default_store
from jaxserve.progress import NullProgress, Progress
from jaxserve.request import Request
from jaxserve.workload.traced_request import TracedRequest

SEQUENCES, CONTEXT, QUEUE = "running sequences", "context, tokens", "waiting requests"


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is measured under.

    Attributes:
      sweep: which of the three is varied.
      context: tokens of each sequence, before it decodes.
    """

    sweep: str
    sequences: int
    context: int
    waiting: int

    @property
    def value(self) -> int:
        """Of what is varied."""
        return {SEQUENCES: self.sequences, CONTEXT: self.context, QUEUE: self.waiting}[self.sweep]


@dataclass(frozen=True, slots=True)
class Point:
    """A load's times, in milliseconds.

    Attributes:
      step: median of the device's steps; None in the sweep of the queue.
      host: planning, building and updating; median.
      floor: see `MachineRates.floor`; None where there is no step.
    """

    load: Load
    step: float | None
    host: float
    floor: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """All points, and what they depend on."""

    model: str
    config: ResolvedConfig
    attention: str
    rates: MachineRates
    repeats: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """What is varied, and where the rest stays meanwhile.

    Attributes:
      sequences, contexts, queues: the values of each sweep.
      at_sequences, at_context: of the other sweeps.
    """

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    queues: tuple[int, ...]
    at_sequences: int
    at_context: int

    def all(self) -> list[Load]:
        """Of every point."""
        return [
            *(Load(SEQUENCES, count, self.at_context, 0) for count in self.sequences),
            *(Load(CONTEXT, self.at_sequences, length, 0) for length in self.contexts),
            *(Load(QUEUE, self.at_sequences, self.at_context, count) for count in self.queues),
        ]


def measure_growth(
    model: str,
    options: EngineConfig,
    sweeps: Sweeps,
    *,
    repeats: int,
    progress: Progress | None = None,
) -> Growth:
    """Compile the shapes of all loads, and time their steps in turn.

    Args:
      options: a context that is too short, or too few slots, for a load is refused.
      repeats: times each step runs.

    Raises:
      JaxserveError: the model or the options can't be used.
    """
    progress = progress or NullProgress()
    checkpoint = open_checkpoint(resolve_model(model, store=default_store(), progress=progress))
    config = resolve(options, checkpoint.config, platform=jax.default_backend())
    loads = sweeps.all()
    most = max(load.sequences for load in loads)
    if most > config.max_num_seqs:
        raise ConfigError(f"{most} running sequences need as many slots, but there are {config.max_num_seqs}")
    requests = [_requests(load, config, checkpoint.config.vocab_size) for load in loads]
    num_blocks = options.num_blocks or max(blocks_for(running, config) for running in requests)
    buckets = default_buckets(config)
    hosts = [
        make_batches(running, config, buckets, num_blocks, waiting=load.waiting)
        for load, running in zip(loads, requests, strict=True)
    ]
    programs = load_step_programs(checkpoint, config, num_blocks=num_blocks, progress=progress)
    on_device = [index for index, load in enumerate(loads) if load.sweep != QUEUE]
    runs = {}
    for done, index in enumerate(on_device):
        progress("Compiling shapes", done, len(on_device))
        runs[index] = programs.step(hosts[index].decode)
    progress("Compiling shapes", len(on_device), len(on_device))
    seconds = time_in_turn(runs, repeats=repeats)
    rates = measure_rates(jnp.dtype(config.dtype))
    points = tuple(
        Point(
            load,
            step=seconds[index] * 1e3 if index in seconds else None,
            host=host.host_seconds * 1e3,
            floor=_floor(checkpoint.config, config, host, rates) * 1e3 if index in seconds else None,
        )
        for index, (load, host) in enumerate(zip(loads, hosts, strict=True))
    )
    return Growth(checkpoint.name, config, programs.attention, rates, repeats, points)


def _requests(load: Load, config: ResolvedConfig, vocab_size: int) -> list[Request]:
    prompts = (tuple((7 * i + k) % vocab_size for k in range(load.context)) for i in range(load.sequences))
    return requests_of(tuple(TracedRequest(prompt, 1) for prompt in prompts), config)


def _floor(model: ModelConfig, config: ResolvedConfig, host: HostSteps, rates: MachineRates) -> float:
    """Seconds of a decode step, at least."""
    rows = host.decode.rows
    cost = decode_step(
        model,
        batch=len(rows),
        context=round(fmean(row.num_computed_tokens + row.num_scheduled_tokens for row in rows)),
        itemsize=jnp.dtype(config.dtype).itemsize,
        quantization=config.quantization,
    )
    return rates.floor(num_bytes=cost.bytes, flops=cost.flops)


def report(result: Growth) -> str:
    """The result as text: a line for each point, times in milliseconds."""
    rates = result.rates
    lines = [
        "",
        f"{result.model}, {result.config.dtype}, attention by {result.attention}; decode steps, milliseconds, "
        f"medians of {result.repeats}; floor from {rates.bytes_per_second / 1e9:.1f} GB/s read and "
        f"{rates.flops_per_second / 1e9:.0f} GFLOP/s",
        "".join(
            f"{name:>12}" for name in ("sequences", "context", "waiting", "step", "floor", "ratio", "host")
        ),
    ]
    for point in result.points:
        cells = [str(count) for count in (point.load.sequences, point.load.context, point.load.waiting)]
        if point.step is None or point.floor is None:
            cells += ["", "", ""]
        else:
            cells += [f"{point.step:.1f}", f"{point.floor:.1f}", f"{point.step / point.floor:.1f}"]
        lines.append("".join(f"{cell:>12}" for cell in [*cells, f"{point.host:.2f}"]))
    return "\n".join(lines)


def to_json(result: Growth) -> dict[str, object]:
    """Everything, with what it depends on."""
    return {
        "benchmark": "growth",
        **describe_environment(),
        "model": result.model,
        "config": asdict(result.config),
        "attention": result.attention,
        "repeats": result.repeats,
        "rates": asdict(result.rates),
        "milliseconds": [
            {**asdict(point.load), "step": point.step, "host": point.host, "floor": point.floor}
            for point in result.points
        ],
    }
