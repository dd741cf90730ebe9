"""`scripts/bench pressure`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import announce, integer, positive_number
from jaxserve.bench.picture import require_matplotlib
from jaxserve.bench.pressure.load import Plan
from jaxserve.bench.pressure.report import plot, report, to_json
from jaxserve.bench.pressure.run import measure_pressure
from jaxserve.progress import Progress
from jaxserve.request import ServiceTargets

_DESCRIPTION = (
    "Measure how many requests a second our server can do, then offer it multiples of that, first without classes "
    "and targets (first come, first served), then with them, each in a server of its own. FLAGS behind -- are those of "
    "both servers. Exit codes: 0; 2 for bad input."
)


def add_command(commands: Any) -> None:
    """Add it to the subcommands of `scripts/bench`."""
    command = commands.add_parser(
        "pressure", help="what becomes of more requests than can be served", description=_DESCRIPTION
    )
    command.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    command.add_argument(
        "--loads",
        type=positive_number,
        nargs="+",
        default=[0.5, 1.0, 2.0, 4.0],
        metavar="X",
        help="multiples of capacity [default: 0.5 1 2 4]",
    )
    for flag, default, unit, what in (
        ("--seconds", 30.0, "S", "of each load"),
        ("--ttft-ms", 2000.0, "MS", "target of interactive requests, to the first token"),
        ("--itl-ms", 500.0, "MS", "the same, between tokens"),
    ):
        command.add_argument(
            flag, type=positive_number, default=default, metavar=unit, help=f"{what} [default: {default:g}]"
        )
    command.add_argument("--seed", type=integer, default=0, help="of the requests [default: 0]")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, ...; needs matplotlib)"
    )
    command.add_argument("flags", nargs="*", metavar="FLAGS", help="of both servers")


def measure(arguments: argparse.Namespace, progress: Progress) -> tuple[str, dict[str, object], int]:
    """Text, facts for JSON, and the exit code."""
    if arguments.plot is not None:
        require_matplotlib()
    plan = Plan(
        loads=tuple(arguments.loads),
        seconds=arguments.seconds,
        targets=ServiceTargets(arguments.ttft_ms / 1e3, arguments.itl_ms / 1e3),
        seed=arguments.seed,
    )
    result = measure_pressure(arguments.model, plan, arguments.flags, announce=announce)
    if arguments.plot is not None:
        plot(result, arguments.plot)
    return report(result), to_json(result), 0
