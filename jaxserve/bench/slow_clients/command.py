"""`scripts/bench slow-clients`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import announce, positive
from jaxserve.bench.slow_clients.run import Plan, is_well, measure_crowds, report, to_json
from jaxserve.progress import Progress

EXIT_NOT_WELL = 1


def add_command(commands: Any) -> None:
    """Add it to the subcommands of `scripts/bench`."""
    command = commands.add_parser(
        "slow-clients",
        help="a thousand clients that do not read, or go away: what they cost the others",
        description="A few clients alone, then beside a crowd that reads, one that does not read its answers, and one "
        "that goes away in the middle: the few's latencies, and the server's memory. Exit codes: 0; 1 if an answer "
        "of the few is not whole or something is left behind; 2 for bad input.",
    )
    plan = Plan()
    command.add_argument("--model", default="smollm2", help="of our own server [default: smollm2]")
    for flag, default, what in (
        ("--clients", plan.clients, "of the crowd"),
        ("--tokens", plan.tokens, "of each answer to one of them"),
        ("--probes", plan.probes, "requests of the few"),
        ("--at-once", plan.at_once, "how many these are"),
    ):
        command.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{what} [default: {default}]"
        )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    command.add_argument("flags", nargs="*", metavar="FLAGS", help="of the server")


def measure(arguments: argparse.Namespace, progress: Progress) -> tuple[str, dict[str, object], int]:
    """Text, facts for JSON, and the exit code."""
    plan = Plan(arguments.clients, arguments.tokens, arguments.probes, arguments.at_once)
    phases = measure_crowds(arguments.model, plan, arguments.flags, announce)
    return report(plan, phases), to_json(plan, phases), 0 if is_well(phases) else EXIT_NOT_WELL
