"""What deterministic mode costs: one workload, one engine with it and one without, one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.measure import Run, run_workload
from jaxserve.bench.static import ample_blocks, median, require_steady, warm_up_of
from jaxserve.config import EngineConfig, ResolvedConfig, replace
from jaxserve.engine_factory import create_engine
from jaxserve.progress import Progress
from jaxserve.workload.traced_request import Workload

DEFAULT, DETERMINISTIC = "default", "deterministic"


@dataclass(frozen=True, slots=True)
class Cost:
    """Every run of both engines, in the order they were made.

    Attributes:
      config: of the deterministic engine; the other differs in the mode alone.
      equal: requests whose tokens are equal in both modes.
    """

    model: str
    workload: Workload
    default: tuple[Run, ...]
    deterministic: tuple[Run, ...]
    config: ResolvedConfig
    equal: int

    @property
    def ratio(self) -> float:
        """Median output throughput, deterministic over default."""
        rate = lambda run: run.output_throughput  # noqa: E731
        return median(self.deterministic, rate) / median(self.default, rate)


def measure_cost(
    model: str,
    workload: Workload,
    options: EngineConfig,
    *,
    repeats: int = 1,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Cost:
    """Run `workload` through both engines in turn, `repeats` times, without prefix cache.

    Raises:
      JaxserveError: the model, the options or a request can't be used, or something was compiled during a pass.
    """
    common = replace(
        options,
        enable_prefix_caching=False,
        max_waiting=max(options.max_waiting, len(workload.requests)),
        num_blocks=options.num_blocks or ample_blocks(workload, options),
    )
    runs: dict[str, list[Run]] = {DEFAULT: [], DETERMINISTIC: []}
    with ExitStack() as stack:
        engines = {}
        for name in runs:
            announce(f"engine: {name}")
            with_mode = replace(common, deterministic=name == DETERMINISTIC)
            engines[name] = stack.enter_context(closing(create_engine(model, with_mode, progress=progress)))
            run_workload(engines[name], warm_up_of(workload))
        for repeat in range(repeats):  # A B, B A, ...: a machine that slows down slows both
            order = list(engines) if repeat % 2 == 0 else list(engines)[::-1]
            for name in order:
                run = run_workload(engines[name], workload)
                runs[name].append(run)
                rate = f"{run.seconds:.1f} s, {run.output_throughput:.1f} output tokens/s"
                announce(f"pass {repeat + 1} of {repeats}, {name}: {rate}")
        require_steady(runs)
        outputs = zip(runs[DEFAULT][0].token_ids, runs[DETERMINISTIC][0].token_ids, strict=True)
        return Cost(
            model=engines[DEFAULT].model_name,
            workload=workload,
            default=tuple(runs[DEFAULT]),
            deterministic=tuple(runs[DETERMINISTIC]),
            config=engines[DETERMINISTIC].config,
            equal=sum(one == other for one, other in outputs),
        )


def report(cost: Cost) -> str:
    """The result as text. Its last line is ``ratio=X.XXX``."""
    config, workload = cost.config, cost.workload
    lines = [
        "",
        f"{cost.model}, {config.dtype}; workload {workload.name}: {len(workload.requests)} requests, "
        "all at once, greedy; "
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}",
        f"outputs: {cost.equal} of {len(workload.requests)} requests have the same tokens in both modes",
        f"median output tokens/s of {len(cost.default)} passes:",
    ]
    for name, runs in ((DEFAULT, cost.default), (DETERMINISTIC, cost.deterministic)):
        rates = sorted(run.output_throughput for run in runs)
        middle = median(runs, lambda run: run.output_throughput)
        lines.append(f"  {name:<14}{middle:>8.1f}   ({rates[0]:.1f}-{rates[-1]:.1f})")
    return "\n".join(
        [*lines, f"deterministic mode costs {1 - cost.ratio:.1%}", "", f"ratio={cost.ratio:.3f}"]
    )


def to_json(cost: Cost) -> dict[str, object]:
    """Everything but the tokens."""
    return {
        "benchmark": "deterministic",
        **describe_environment(),
        "model": cost.model,
        "workload": {"name": cost.workload.name, "requests": len(cost.workload.requests)},
        "config": asdict(cost.config),
        "seconds": {
            DEFAULT: [round(run.seconds, 3) for run in cost.default],
            DETERMINISTIC: [round(run.seconds, 3) for run in cost.deterministic],
        },
        "steps": [cost.default[0].steps, cost.deterministic[0].steps],
        "output_tokens": cost.default[0].num_output_tokens,
        "equal_requests": cost.equal,
        "ratio": round(cost.ratio, 4),
    }
