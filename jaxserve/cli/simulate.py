"""`jaxserve simulate`: a workload through the real scheduler, with steps that only cost time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.engine_options import SchedulerChoice


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Requests and their arrivals: of `jaxserve trace`, Azure's CSV, Mooncake's JSON lines.",
            show_default=False,
        ),
    ],
    costs: Annotated[
        Path,
        typer.Option(
            metavar="COSTS.json",
            help="An engine's limits and step times, that `serve --record-costs` wrote.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="Scheduling policy [default: the recorded engine's]."),
    ] = None,
    scheduler: Annotated[
        SchedulerChoice | None, typer.Option(help="[default: the recorded engine's]", show_default=False)
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the KV cache [default: the recorded engine's].")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="At most the recorded engine's, which is the default.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="At most the recorded engine's, which is the default.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(min=1, help="Sequences that may wait [default: the recorded engine's].")
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="BYTES",
            help="Host memory for blocks of the KV cache; 0 is none [default: the recorded engine's].",
        ),
    ] = None,
    transfer_rate: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES",
            help="How many bytes a second blocks move at, to host memory and back [default: as measured].",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    faster: Annotated[float, typer.Option(help="Let requests come so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the spread of step times.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures there as well.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the latencies (.png, .svg, ...; needs matplotlib).", show_default=False
        ),
    ] = None,
) -> None:
    """Run a workload in simulated time, and print its latencies, goodput, refusals and preemptions.

    The scheduler, its policy and the engine around them are those that serve; only the device is a model of how long
    its steps take. A policy or a limit can be tried on hours of traffic in seconds. How far that is from the truth:
    docs/experiments.md.

    \b
    Example:
      jaxserve serve --model smollm2 --record-costs costs.json      # serve for a while, then end it
      jaxserve trace --requests 2000 --rate 1 --background-share 0.3 --output mixed.jsonl
      jaxserve simulate --trace mixed.jsonl --costs costs.json
    """
    from jaxserve.bench.latency_plot import plot_latencies
    from jaxserve.bench.picture import require_matplotlib
    from jaxserve.errors import ConfigError
    from jaxserve.recording.costs_file import read_costs
    from jaxserve.simulation import latencies
    from jaxserve.simulation.simulate import Variation, simulate_workload
    from jaxserve.workload.reader import read_workload

    if transfer_rate is not None and transfer_rate <= 0:
        raise ConfigError(f"--transfer-rate must be more than 0, got {transfer_rate:g}")
    if plot is not None:
        require_matplotlib()
    variation = Variation(
        policy=policy,
        scheduler=None if scheduler is None else scheduler.value,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=max_waiting,
        host_memory=host_memory,
        transfer_rate=transfer_rate,
    )
    workload = read_workload(trace, limit=limit).faster(faster)
    result = simulate_workload(read_costs(costs), workload, variation, seed=seed)
    summary = latencies.summarise(result.drive)
    if json_file is not None:
        facts = {"trace": trace.name, "costs": costs.name, **summary.to_json(), "swap": asdict(result.swap)}
        json_file.write_text(json.dumps(facts, indent=2) + "\n")
    if plot is not None:
        plot_latencies({"simulated": result.drive}, plot)
    print(latencies.table(summary))
    if result.swap.blocks:
        swap = result.swap
        print(
            f"host memory: {swap.out_blocks} blocks out, {swap.in_blocks} in, {swap.preemptions} of "
            f"{summary.preemptions} preemptions by swap, {swap.hits} tokens of prompts found there"
        )
    print(
        f"\nsimulated in {result.wall_seconds:.2f} s, {result.drive.seconds / result.wall_seconds:,.0f} times as fast "
        "as the clock"
    )
