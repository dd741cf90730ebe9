"""How a step's time grows: with the running sequences, with their contexts, and with the queue behind them.

The first two are the real programs of decode steps that the real scheduler planned, beside the least that the device
could take: every parameter and every key and value read once, every product computed, at measured rates. The third is
the host's part alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

import jax
import jax.numpy as jnp

from jaxserve.batch.buckets import default_buckets
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.machine_rates import MachineRates, measure_rates
from jaxserve.bench.step_batches import blocks_for, make_batches, requests_of
from jaxserve.bench.step_programs import StepPrograms
from jaxserve.bench.workload import Item
from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.host_allocator import keep_freed_memory
from jaxserve.device.kv_cache import block_bytes
from jaxserve.errors import ConfigError
from jaxserve.model_store import default_store
from jaxserve.progress import NullProgress, Progress
from jaxserve.request import Request
from pallas_kernels.paged_attention import facts_of

SEQUENCES, CONTEXT, QUEUE = "running sequences", "context, tokens", "waiting requests"


@dataclass(frozen=True, slots=True)
class Point:
    """One load and its times, in milliseconds.

    Attributes:
      sweep: which of the three is varied.
      value: of what is varied.
      sequences, context, waiting: the whole load; `context` is each sequence's.
      step: median of the device's steps; None in the sweep of the queue.
      host: planning, building and updating; median.
      floor: see `MachineRates.floor`; None where there is no step.
    """

    sweep: str
    value: int
    sequences: int
    context: int
    waiting: int
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
class Loads:
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

    def all(self) -> list[tuple[str, int, int, int]]:
        """(sweep, sequences, context, waiting) of each point."""
        return [
            *((SEQUENCES, count, self.at_context, 0) for count in self.sequences),
            *((CONTEXT, self.at_sequences, length, 0) for length in self.contexts),
            *((QUEUE, self.at_sequences, self.at_context, count) for count in self.queues),
        ]


def measure_growth(
    model: str,
    options: EngineConfig,
    loads: Loads,
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
    most = max(sequences for _, sequences, _, _ in loads.all())
    if most > config.max_num_seqs:
        raise ConfigError(f"{most} running sequences need as many slots, but there are {config.max_num_seqs}")
    made = [
        (load, _requests(load, config, checkpoint.config.vocab_size), default_buckets(config))
        for load in loads.all()
    ]
    num_blocks = options.num_blocks or max(blocks_for(running, config) for _, running, _ in made)
    hosts = [
        make_batches(running, config, buckets, num_blocks, waiting=load[3]) for load, running, buckets in made
    ]
    dtype = jnp.dtype(config.dtype)
    attention = choose_attention(checkpoint.config, config, facts_of(jax.local_devices()[0]))
    params = checkpoint.load_params(dtype, quantization=config.quantization, progress=progress)
    if jax.default_backend() == "cpu":
        keep_freed_memory()  # as an engine does
    programs = StepPrograms(checkpoint.config, config, params, attention=attention, num_blocks=num_blocks)
    on_device = [index for index, (load, _, _) in enumerate(made) if load[0] != QUEUE]
    steps = {}
    for done, index in enumerate(on_device):
        progress("Compiling shapes", done, len(on_device))
        steps[index] = programs.step(hosts[index].decode)
    progress("Compiling shapes", len(on_device), len(on_device))
    seconds: dict[int, list[float]] = {index: [] for index in on_device}
    for repeat in range(repeats + 1):
        for index, run in steps.items():
            value = run()
            if repeat:  # the first run of each is a warm-up
                seconds[index].append(value)
    rates = measure_rates(dtype)
    weights = checkpoint.param_bytes(dtype, quantization=config.quantization)
    points = []
    for index, ((sweep, sequences, context, waiting), _, _) in enumerate(made):
        lengths = [row.num_computed_tokens + row.num_scheduled_tokens for row in hosts[index].decode.rows]
        floor = _floor(checkpoint.config, config, weights, lengths, rates) * 1e3
        is_step = index in seconds
        points.append(
            Point(
                sweep=sweep,
                value={SEQUENCES: sequences, CONTEXT: context, QUEUE: waiting}[sweep],
                sequences=sequences,
                context=context,
                waiting=waiting,
                step=median(seconds[index]) * 1e3 if is_step else None,
                host=hosts[index].host_seconds * 1e3,
                floor=floor if is_step else None,
            )
        )
    return Growth(checkpoint.name, config, attention.name, rates, repeats, tuple(points))


def _requests(load: tuple[str, int, int, int], config: ResolvedConfig, vocab_size: int) -> list[Request]:
    _, sequences, context, _ = load
    prompts = (tuple((7 * i + k) % vocab_size for k in range(context)) for i in range(sequences))
    return requests_of(tuple(Item(prompt, 1) for prompt in prompts), config)


def _floor(
    model: ModelConfig, config: ResolvedConfig, weights: int, lengths: list[int], rates: MachineRates
) -> float:
    """Seconds of a decode step of sequences of these lengths, at least."""
    per_token = block_bytes(model, config.block_size, jnp.dtype(config.dtype)) / config.block_size
    each_row = 2 * num_matrix_entries(model)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * sum(lengths)
    return rates.floor(
        num_bytes=weights + per_token * sum(lengths), flops=each_row * len(lengths) + attention
    )


def num_matrix_entries(model: ModelConfig) -> int:
    """Entries of the matrices that a row is multiplied with: the layers' and the output head's."""
    width, head = model.hidden_size, model.head_dim
    attention = 2 * width * head * (model.num_heads + model.num_kv_heads)
    return model.num_layers * (attention + 3 * width * model.intermediate_size) + width * model.vocab_size


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
        cells = [str(point.sequences), str(point.context), str(point.waiting)]
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
        "milliseconds": [asdict(point) for point in result.points],
    }
