"""How far a simulation is from the truth: one workload for real, and in simulated time with the costs learned there."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from jaxserve.bench.environment import describe_environment
from jaxserve.config import EngineConfig, ResolvedConfig
from jaxserve.engine_factory import create_engine
from jaxserve.errors import JaxserveError
from jaxserve.progress import Progress
from jaxserve.recording.costs_file import EngineCosts, costs_of
from jaxserve.simulation.drive import Drive, WallClock, drive
from jaxserve.simulation.latencies import PERCENTS, summarise
from jaxserve.simulation.simulate import Simulation, simulate_workload
from jaxserve.workload.generator import WorkloadSpec, generate
from jaxserve.workload.traced_request import Workload

MEASURES = ("ttft", "tpot", "itl", "e2e")
NUM_SIMULATIONS = 9

Figures = dict[str, dict[int, float]]  # seconds, by measure and percent


@dataclass(frozen=True, slots=True)
class Check:
    """A workload three times.

    Attributes:
      real: by the clock, on the device.
      learned: simulated, with what was learned up to the end of the real pass; several times, with other seeds of the
        step times' spread.
      predicted: the same with what was learned from another workload before it.
    """

    model: str
    config: ResolvedConfig
    spec: WorkloadSpec
    seed: int
    real: Drive
    learned: tuple[Simulation, ...]
    predicted: tuple[Simulation, ...]


def check_simulation(
    model: str,
    options: EngineConfig,
    spec: WorkloadSpec,
    *,
    seed: int,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Check:
    """Learn what steps cost from one workload, run another for real, and simulate that.

    Args:
      spec: of both; they differ in their seeds, and the first is half as long.

    Raises:
      JaxserveError: the model or the options can't be used, or something was compiled during a pass.
    """
    clock = WallClock()
    with closing(create_engine(model, options, progress=progress)) as engine:
        half = dataclasses.replace(spec, num_requests=-(-spec.num_requests // 2))
        first, workload = generate(half, seed + 1, name="first"), generate(spec, seed, name="measured")
        announce(f"learning: {_size(first)}")
        drive(engine, first, clock, prefix="learn-")
        before = costs_of(engine)
        announce(f"for real: {_size(workload)}")
        real = drive(engine, workload, clock)
        after = costs_of(engine)
        if engine.stats.serving_compilations:
            raise JaxserveError("something was compiled while it was measured")
        name, config = engine.model_name, engine.config
    announce("simulating")
    return Check(name, config, spec, seed, real, _simulate(after, workload), _simulate(before, workload))


def report(check: Check) -> str:
    """For people."""
    total = summarise(check.real).total
    lines = [
        f"{check.model}, {check.config.dtype}; {total.num_requests} requests, {check.spec.arrivals.rate:g} a second, "
        f"seed {check.seed}; max_num_seqs {check.config.max_num_seqs}, max_num_batched_tokens "
        f"{check.config.max_num_batched_tokens}",
        "",
        f"{'':12}{'real':>10}{'simulated':>12}{'error':>9}{'beforehand':>13}{'error':>9}",
    ]
    learned, predicted = medians(check.learned), medians(check.predicted)
    for measure in MEASURES:
        for percent in PERCENTS:
            real, one, other = (part[measure][percent] for part in (figures(check.real), learned, predicted))
            lines.append(
                f"{measure.upper() + f' P{percent}':12}{real:>8.3f} s{one:>10.3f} s{one / real - 1:>+9.1%}"
                f"{other:>11.3f} s{other / real - 1:>+9.1%}"
            )
    first = check.learned[0]
    lines += [
        "",
        f"steps: real {check.real.steps}, simulated {first.drive.steps}; "
        f"seconds: real {check.real.seconds:.1f}, simulated {first.drive.seconds:.1f}",
        f"medians of {NUM_SIMULATIONS} simulations; each took {first.wall_seconds:.2f} s, "
        f"{first.drive.seconds / first.wall_seconds:,.0f} times as fast as the clock",
    ]
    return "\n".join(lines)


def figures(result: Drive) -> Figures:
    """The percentiles of a pass, by measure."""
    total = summarise(result).total
    return {measure: getattr(total, measure) for measure in MEASURES}


def medians(simulations: Sequence[Simulation]) -> Figures:
    """Of each percentile, over simulations of one workload."""
    all_figures = [figures(one.drive) for one in simulations]
    return {
        measure: {
            percent: statistics.median(one[measure][percent] for one in all_figures) for percent in PERCENTS
        }
        for measure in MEASURES
    }


def to_json(check: Check) -> dict[str, object]:
    """The figures, and all that they depend on."""
    return {
        "environment": describe_environment(),
        "model": check.model,
        "config": asdict(check.config),
        "workload": {"seed": check.seed, **asdict(check.spec)},
        "real": summarise(check.real).to_json(),
        "simulated": _simulated(check, check.learned),
        "simulated_beforehand": _simulated(check, check.predicted),
    }


def _simulated(check: Check, simulations: Sequence[Simulation]) -> dict[str, object]:
    real, found = figures(check.real), medians(simulations)
    return {
        "seconds": found,
        "errors": {
            measure: {percent: found[measure][percent] / real[measure][percent] - 1 for percent in PERCENTS}
            for measure in MEASURES
        },
        "simulations": len(simulations),
        "steps": statistics.median(one.drive.steps for one in simulations),
        "wall_seconds": statistics.median(one.wall_seconds for one in simulations),
    }


def _simulate(costs: EngineCosts, workload: Workload) -> tuple[Simulation, ...]:
    return tuple(simulate_workload(costs, workload, seed=seed) for seed in range(NUM_SIMULATIONS))


def _size(workload: Workload) -> str:
    return (
        f"{len(workload.requests)} requests in {workload.seconds:.0f} s, {workload.num_prompt_tokens} prompt and "
        f"{workload.num_output_tokens} output tokens"
    )
