"""Where the time of a step goes: the real programs of real batches, part by part.

Each part is timed by itself, waiting for its end; so is the whole step, as an engine launches it. Attention is what a
layer takes beyond the same layer without it (that still writes keys and values). Variants take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import default_buckets
from jaxserve.batch.builder import HostBatch
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.step_batches import blocks_for, make_batches, requests_of
from jaxserve.bench.step_programs import (
    BARE_LAYERS,
    BEGIN,
    END,
    LAYERS,
    STEP,
    load_step_programs,
    time_in_turn,
)
from jaxserve.checkpoint import open_checkpoint, resolve_model
from jaxserve.config import EngineConfig, ResolvedConfig, resolve
from jaxserve.errors import ConfigError
from jaxserve.model_store import default_store
from jaxserve.progress import NullProgress, Progress
from jaxserve.workload.traced_request import Workload

DECODE, PROMPTS = "decode", "prompts"
PARTS = ("begin", "attention", "layers", "end")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One shape's times: medians, in milliseconds.

    Attributes:
      kind: "decode", or "prompts": the first step of all, which only prompts fill.
      rows, tokens: real ones. mean_context: tokens in the cache, the mean of the rows.
      step: as an engine runs it. parts: by name, in `PARTS`; "layers" is without attention.
      host: planning, building and updating; None where it was not measured.
    """

    kind: str
    bucket: Bucket
    rows: int
    tokens: int
    mean_context: float
    step: float
    parts: dict[str, float]
    host: float | None

    @property
    def attention_share(self) -> float:
        """Of the parts' sum."""
        return self.parts["attention"] / sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Times of every shape."""

    model: str
    workload: Workload
    config: ResolvedConfig
    attention: str
    repeats: int
    times: tuple[StepTimes, ...]


def measure_steps(
    model: str,
    workload: Workload,
    options: EngineConfig,
    *,
    rows: tuple[int, ...],
    repeats: int,
    progress: Progress | None = None,
) -> Breakdown:
    """Compile the shapes that decode the first so many requests of `workload` (for each of `rows`), and time them.

    Args:
      repeats: times each variant runs.

    Raises:
      JaxserveError: the model or the options can't be used; there are fewer requests or slots than rows.
    """
    progress = progress or NullProgress()
    checkpoint = open_checkpoint(resolve_model(model, store=default_store(), progress=progress))
    config = resolve(options, checkpoint.config, platform=jax.default_backend())
    most = min(len(workload.requests), config.max_num_seqs)
    if max(rows) > most:
        raise ConfigError(f"{max(rows)} rows need as many requests and slots, but there are {most}")
    items = [workload.requests[:count] for count in sorted(rows)]
    num_blocks = options.num_blocks or blocks_for(requests_of(items[-1], config), config)
    buckets = default_buckets(config)
    made = [make_batches(requests_of(some, config), config, buckets, num_blocks) for some in items]
    cases: list[tuple[str, HostBatch, float | None]] = [
        (DECODE, steps.decode, steps.host_seconds * 1e3) for steps in made
    ]
    cases.append((PROMPTS, made[-1].prompts, None))
    programs = load_step_programs(checkpoint, config, num_blocks=num_blocks, progress=progress)
    runs: dict[tuple[int, str], Callable[[], float]] = {}
    for index, (_, batch, _) in enumerate(cases):
        progress("Compiling shapes", index, len(cases))
        runs |= {(index, name): run for name, run in programs.variants(batch).items()}
    progress("Compiling shapes", len(cases), len(cases))
    seconds = time_in_turn(runs, repeats=repeats)
    times = tuple(
        _times(*case, {name: value for (case_of, name), value in seconds.items() if case_of == index})
        for index, case in enumerate(cases)
    )
    return Breakdown(checkpoint.name, workload, config, programs.attention, repeats, times)


def _times(kind: str, batch: HostBatch, host: float | None, seconds: dict[str, float]) -> StepTimes:
    middle = {name: value * 1e3 for name, value in seconds.items()}
    parts = (middle[BEGIN], middle[LAYERS] - middle[BARE_LAYERS], middle[BARE_LAYERS], middle[END])
    lengths = [row.num_computed_tokens + row.num_scheduled_tokens for row in batch.rows]
    return StepTimes(
        kind=kind,
        bucket=batch.bucket,
        rows=len(batch.rows),
        tokens=batch.num_tokens,
        mean_context=statistics.mean(lengths),
        step=middle[STEP],
        parts=dict(zip(PARTS, parts, strict=True)),
        host=host,
    )


def report(result: Breakdown) -> str:
    """The result as text: a table with a line for each shape, times in milliseconds."""
    names = ("shape", "rows", "tokens", "context", "step", *PARTS, "host", "attention %")
    lines = [
        "",
        f"{result.model}, {result.config.dtype}, attention by {result.attention}; workload {result.workload.name}, "
        f"requests half done; milliseconds, medians of {result.repeats}",
        "".join(f"{name:>13}" for name in names),
    ]
    for times in result.times:
        numbers = [times.step, *times.parts.values()]
        host = "" if times.host is None else f"{times.host:.2f}"
        cells = [
            f"T{times.bucket.tokens} {times.kind}",
            str(times.rows),
            str(times.tokens),
            f"{times.mean_context:.0f}",
            *(f"{value:.2f}" for value in numbers),
            host,
            f"{times.attention_share:.1%}",
        ]
        lines.append("".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def to_json(result: Breakdown) -> dict[str, object]:
    """Everything, with what it depends on."""
    return {
        "benchmark": "step",
        **describe_environment(),
        "model": result.model,
        "workload": {"name": result.workload.name, "requests": len(result.workload.requests)},
        "config": asdict(result.config),
        "attention": result.attention,
        "repeats": result.repeats,
        "milliseconds": [
            {**asdict(times), "bucket": str(times.bucket), "attention_share": round(times.attention_share, 4)}
            for times in result.times
        ],
    }
