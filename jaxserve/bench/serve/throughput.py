"""An engine in this process, given everything at once: how fast it is without a network or clients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from jaxserve.bench.measure import Run, run_workload
from jaxserve.bench.static import require_steady, warm_up_of
from jaxserve.engine import EngineCore
from jaxserve.simulation.latencies import percentiles
from jaxserve.workload.traced_request import Workload


def measure_throughput(engine: EngineCore, workload: Workload, repeats: int) -> list[Run]:
    """Passes one after the other, after a few short requests.

    Raises:
      JaxserveError: a request does not fit, something was compiled meanwhile, or two passes gave different tokens.
    """
    run_workload(engine, warm_up_of(workload))
    runs = [run_workload(engine, workload) for _ in range(repeats)]
    require_steady({"": runs})
    return runs


def figures_of_runs(runs: Sequence[Run]) -> dict[str, float]:
    """By name, flat, medians over the passes; times in milliseconds where the name says so."""
    each = [_figures(run) for run in runs]
    return {name: statistics.median(one[name] for one in each) for name in each[0]}


def spread(runs: Sequence[Run]) -> dict[str, Any]:
    """Lowest and highest output tokens a second."""
    rates = [run.output_throughput for run in runs]
    return {"passes": len(runs), "lowest": min(rates), "highest": max(rates)}


def _figures(run: Run) -> dict[str, float]:
    figures = {
        "seconds": run.seconds,
        "requests/s": len(run.token_ids) / run.seconds,
        "output tokens/s": run.output_throughput,
        "total tokens/s": run.total_throughput,
        "steps": run.steps,
        "packing efficiency": run.packing_efficiency,
        "slot utilisation": run.slot_utilisation,
        "preemptions": run.preemptions,
    }
    for measure, values in (("ttft", run.first_token), ("e2e", run.finished)):
        for percent, value in percentiles(values).items():
            figures[f"{measure} P{percent} ms"] = value * 1000
    return figures
