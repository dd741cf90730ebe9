"""How far a simulation is from the truth: one workload for real, and in simulated time with the costs learned there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass

from jaxserve.bench.environment import describe_environment
from jaxserve.config import EngineConfig, ResolvedConfig
from jaxserve.engine_factory import create_engine
from jaxserve.errors import JaxserveError
from jaxserve.progress import Progress
from jaxserve.recording.costs_file import EngineCosts, costs_of
from jaxserve.simulation.drive import Drive, WallClock, drive
from jaxserve.simulation.latencies import PERCENTS, PassSummary, summarise
from jaxserve.simulation.simulate import Simulation, simulate_workload
from jaxserve.workload.generator import WorkloadSpec, generate
from jaxserve.workload.traced_request import Workload

MEASURES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Check:
    """A workload three times.

    Attributes:
      real: by the clock, on the device.
      learned: simulated, with what was learned up to the end of the real pass.
      predicted: simulated, with what was learned from another workload before it.
    """

    model: str
    config: ResolvedConfig
    spec: WorkloadSpec
    seed: int
    real: Drive
    learned: Simulation
    predicted: Simulation

    def error(self, simulated: Simulation, measure: str, percent: int) -> float:
        """Simulated over real, minus 1."""
        mine = getattr(summarise(simulated.drive).total, measure)[percent]
        return float(mine / getattr(summarise(self.real).total, measure)[percent]) - 1


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
      spec: of both; they differ in their seeds.

    Raises:
      JaxserveError: the model or the options can't be used, or something was compiled during a pass.
    """
    clock = WallClock()
    with closing(create_engine(model, options, progress=progress)) as engine:
        first, workload = generate(spec, seed + 1, name="first"), generate(spec, seed, name="measured")
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
    return Check(
        name, config, spec, seed, real, _simulate(after, workload, seed), _simulate(before, workload, seed)
    )


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
    learned, predicted = summarise(check.learned.drive).total, summarise(check.predicted.drive).total
    for measure in MEASURES:
        for percent in PERCENTS:
            real, one, other = (getattr(part, measure)[percent] for part in (total, learned, predicted))
            lines.append(
                f"{measure.upper() + f' P{percent}':12}{real:>8.3f} s{one:>10.3f} s{one / real - 1:>+9.1%}"
                f"{other:>11.3f} s{other / real - 1:>+9.1%}"
            )
    lines += [
        "",
        f"steps: real {check.real.steps}, simulated {check.learned.drive.steps}; "
        f"seconds: real {check.real.seconds:.1f}, simulated {check.learned.drive.seconds:.1f}",
        f"the simulation took {check.learned.wall_seconds:.2f} s: "
        f"{check.learned.drive.seconds / check.learned.wall_seconds:,.0f} times as fast as the clock",
    ]
    return "\n".join(lines)


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


def _simulated(check: Check, simulated: Simulation) -> dict[str, object]:
    summary: PassSummary = summarise(simulated.drive)
    errors = {
        measure: {percent: check.error(simulated, measure, percent) for percent in PERCENTS}
        for measure in MEASURES
    }
    return {**summary.to_json(), "errors": errors, "wall_seconds": simulated.wall_seconds}


def _simulate(costs: EngineCosts, workload: Workload, seed: int) -> Simulation:
    return simulate_workload(costs, workload, seed=seed)


def _size(workload: Workload) -> str:
    return (
        f"{len(workload.requests)} requests in {workload.seconds:.0f} s, {workload.num_prompt_tokens} prompt and "
        f"{workload.num_output_tokens} output tokens"
    )
