"""Continuous batching against static batching: one workload, one engine, two schedulers, one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from jaxserve.bench.agreement import NEAR_TIE, Difference, find_differences
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.measure import Run, run_workload
from jaxserve.config import EngineConfig, ResolvedConfig, replace
from jaxserve.engine_factory import create_engine
from jaxserve.errors import JaxserveError
from jaxserve.progress import Progress
from jaxserve.workload.traced_request import TracedRequest, Workload

CONTINUOUS, STATIC = "continuous", "static"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every run of both engines, in the order they were made, and the configurations.

    Attributes:
      differences: where the two outputs of a request part ways.
      near_tie: the largest margin at which they may.
    """

    model: str
    workload: Workload
    continuous: tuple[Run, ...]
    static: tuple[Run, ...]
    continuous_config: ResolvedConfig
    static_config: ResolvedConfig
    num_blocks: int
    differences: tuple[Difference, ...]
    near_tie: float

    @property
    def ratio(self) -> float:
        """Median output throughput, continuous over static."""
        return median(self.continuous, _throughput) / median(self.static, _throughput)

    @property
    def real_differences(self) -> tuple[Difference, ...]:
        """Those that no near-tie excuses."""
        return tuple(item for item in self.differences if item.margin > self.near_tie)


def compare(
    model: str,
    workload: Workload,
    options: EngineConfig,
    *,
    static_batch: int | None = None,
    repeats: int = 1,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run `workload` through both engines, one after the other, `repeats` times.

    The prefix cache is off in both: a second pass would find its prompts in it.

    Args:
      options: of both engines; its scheduler, prefix cache and queue limit are chosen here, and the pool's size
        where it names none.
      static_batch: `max_num_seqs` of the static engine, if it is to be another.
      announce: told a line before and after every pass.

    Raises:
      JaxserveError: the model, the options or a request can't be used, or something was compiled during a pass.
    """
    common = replace(
        options,
        scheduler=CONTINUOUS,
        enable_prefix_caching=False,
        max_waiting=max(options.max_waiting, len(workload.requests)),
        num_blocks=options.num_blocks or ample_blocks(workload, options),
    )
    runs: dict[str, list[Run]] = {CONTINUOUS: [], STATIC: []}
    with ExitStack() as stack:
        announce("engine 1 of 2: continuous")
        continuous = stack.enter_context(closing(create_engine(model, common, progress=progress)))
        announce("engine 2 of 2: static")
        other = static_options(common, static_batch)
        static = stack.enter_context(closing(create_engine(model, other, progress=progress)))
        engines = {CONTINUOUS: continuous, STATIC: static}
        for name, engine in engines.items():
            announce(f"warming up: {name}")
            run_workload(engine, warm_up_of(workload))
        for repeat in range(repeats):  # A B A B, so that a machine that slows down slows both
            for name, engine in engines.items():
                run = run_workload(engine, workload)
                runs[name].append(run)
                announce(
                    f"pass {repeat + 1} of {repeats}, {name}: {run.seconds:.1f} s, "
                    f"{run.output_throughput:.1f} output tokens/s"
                )
        require_steady(runs)
        differences = find_differences(
            continuous, workload, runs[CONTINUOUS][0].token_ids, runs[STATIC][0].token_ids
        )
        return Comparison(
            model=continuous.model_name,
            workload=workload,
            continuous=tuple(runs[CONTINUOUS]),
            static=tuple(runs[STATIC]),
            continuous_config=continuous.config,
            static_config=static.config,
            num_blocks=continuous.stats.num_blocks,
            differences=tuple(differences),
            near_tie=NEAR_TIE[continuous.config.dtype],
        )


def ample_blocks(workload: Workload, options: EngineConfig) -> int:
    """So many KV blocks that nobody is ever preempted: room for as many of the longest requests as run at once.

    Two engines have to fit in memory, so neither can take the share that an engine takes by itself.
    """
    size = options.block_size
    needed = sorted(-(-(len(item.prompt_token_ids) + item.max_tokens) // size) for item in workload.requests)
    return sum(needed if options.max_num_seqs is None else needed[-options.max_num_seqs :])


def static_options(continuous: EngineConfig, static_batch: int | None) -> EngineConfig:
    """Options of the static engine: those of the other one, but for the scheduler and perhaps the batch size."""
    options = replace(continuous, scheduler=STATIC)
    return options if static_batch is None else replace(options, max_num_seqs=static_batch)


def median[R](runs: Sequence[R], value: Callable[[R], float]) -> float:
    """The median of something over the runs."""
    return statistics.median(map(value, runs))


def _throughput(run: Run) -> float:
    return run.output_throughput


def warm_up_of(workload: Workload) -> Workload:
    """A few short requests: programs that were just loaded pay for their first execution here."""
    items = tuple(
        TracedRequest(item.prompt_token_ids[:32], min(item.max_tokens, 4)) for item in workload.requests[:4]
    )
    return Workload("warm-up", items)


def require_steady(runs: dict[str, list[Run]]) -> None:
    """Raises JaxserveError: something was compiled during a pass, or two passes of an engine differ."""
    for name, passes in runs.items():
        if compiled := sum(run.compilations for run in passes):
            raise JaxserveError(f"{compiled} programs were compiled while the {name} engine was measured")
        for run in passes[1:]:
            if run.token_ids != passes[0].token_ids:
                raise JaxserveError(f"two passes of the {name} engine gave different tokens")


# What is shown: (name, unit, digits, value).
_ROWS: tuple[tuple[str, str, int, Callable[[Run], float]], ...] = (
    ("time", "s", 2, lambda run: run.seconds),
    ("output throughput", "tok/s", 1, _throughput),
    ("total throughput (prompt + output)", "tok/s", 1, lambda run: run.total_throughput),
    ("packing efficiency (useful / computed)", "", 3, lambda run: run.packing_efficiency),
    ("useful tokens", "", 0, lambda run: run.useful_tokens),
    ("computed tokens", "", 0, lambda run: run.padded_tokens),
    ("slot utilisation", "", 3, lambda run: run.slot_utilisation),
    ("steps", "", 0, lambda run: run.steps),
    ("preemptions", "", 0, lambda run: run.preemptions),
    ("time to first token, P50", "s", 2, lambda run: run.ttft(50)),
    ("time to first token, P99", "s", 2, lambda run: run.ttft(99)),
    ("request latency, P50", "s", 2, lambda run: run.latency(50)),
    ("request latency, P99", "s", 2, lambda run: run.latency(99)),
)

_WHAT_STATIC_IS = """\
static baseline: the same engine, model and programs with scheduler=static. Up to max_num_seqs={slots} requests start
together, and none joins until all have ended; prompts are padded to the longest of the batch; rows of ended members
are computed until the last one ends. Padding is free in attention, though (a row of padding has no context to read),
so the baseline is cheaper than one that pads attention as well."""


def report(result: Comparison) -> str:
    """The result as text. Its last line is ``ratio=X.XX``."""
    config = result.continuous_config
    lines = [
        "",
        f"{result.model}, {config.dtype}; workload {result.workload.name}: {len(result.workload.requests)} requests, "
        f"all at once, {result.workload.num_prompt_tokens} prompt and {result.workload.num_output_tokens} output "
        "tokens, greedy, EOS ignored",
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"{result.num_blocks} blocks of {config.block_size}, no prefix cache",
        _WHAT_STATIC_IS.format(slots=result.static_config.max_num_seqs),
        _agreement(result),
        "",
        *_table(result),
        "",
        f"ratio={result.ratio:.2f}",
    ]
    return "\n".join(lines)


def _agreement(result: Comparison) -> str:
    total = len(result.workload.requests)
    if not result.differences:
        return f"outputs: equal in all {total} requests"
    real = result.real_differences
    worst = max(result.differences, key=lambda item: item.margin)
    text = (
        f"outputs: {total - len(result.differences)} of {total} equal; {len(result.differences) - len(real)} part at "
        f"a near-tie (the two best logits at most {result.near_tie:g} apart), {len(real)} elsewhere; largest margin "
        f"{worst.margin:.2g} (request {worst.request}, output token {worst.position})"
    )
    return text if not real else f"{text}\nERROR: the engines disagree where the model was not undecided"


def _table(result: Comparison) -> list[str]:
    passes = len(result.continuous)
    title = "median of " + str(passes) + " passes" if passes > 1 else "one pass"
    lines = [f"{title:<46}{CONTINUOUS:>12}{STATIC:>12}"]
    for name, unit, digits, value in _ROWS:
        left, right = median(result.continuous, value), median(result.static, value)
        label = f"{name}, {unit}" if unit else name
        lines.append(f"{label:<46}{left:>12.{digits}f}{right:>12.{digits}f}")
    if passes > 1:
        spread = ["lowest and highest output throughput, tok/s"]
        for runs in (result.continuous, result.static):
            rates = sorted(map(_throughput, runs))
            spread.append(f"{rates[0]:.0f}-{rates[-1]:.0f}")
        lines.append(f"{spread[0]:<46}{spread[1]:>12}{spread[2]:>12}")
    return lines


def to_json(result: Comparison) -> dict[str, object]:
    """Everything but the tokens."""
    return {
        "benchmark": "static",
        **describe_environment(),
        "model": result.model,
        "workload": {
            "name": result.workload.name,
            "requests": len(result.workload.requests),
            "prompt_tokens": result.workload.num_prompt_tokens,
            "output_tokens": result.workload.num_output_tokens,
        },
        "config": {
            CONTINUOUS: {**asdict(result.continuous_config), "num_blocks": result.num_blocks},
            STATIC: {**asdict(result.static_config), "num_blocks": result.num_blocks},
        },
        "runs": {
            CONTINUOUS: [_run_json(run) for run in result.continuous],
            STATIC: [_run_json(run) for run in result.static],
        },
        "differences": [asdict(item) for item in result.differences],
        "near_tie": result.near_tie,
        "ratio": round(result.ratio, 4),
    }


def _run_json(run: Run) -> dict[str, float]:
    return {name: round(value(run), 6) for name, _, _, value in _ROWS}
