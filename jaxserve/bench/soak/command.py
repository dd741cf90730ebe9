"""`scripts/bench soak`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import announce, integer, positive
from jaxserve.bench.soak.run import report, soak, to_json
from jaxserve.progress import Progress

EXIT_UNWELL = 1
_DESCRIPTION = (
    "Send requests with priorities, stop strings, several choices, shared beginnings, and clients that go away, to our "
    "own server in deterministic mode; see that each ended, that nothing is left behind, and that answers are the same "
    "when asked for again, alone. FLAGS behind -- are those of the server. Exit codes: 0; 1 if not; 2 for bad input."
)


def add_command(commands: Any) -> None:
    """Add it to the subcommands of `scripts/bench`."""
    command = commands.add_parser(
        "soak", help="thousands of requests of every kind against a small pool", description=_DESCRIPTION
    )
    command.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    for flag, default, what in (
        ("--requests", 10_000, "requests in all"),
        ("--clients", 64, "requests in progress at a time"),
        ("--compare", 200, "answers asked for again"),
    ):
        command.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{what} [default: {default}]"
        )
    command.add_argument("--seed", type=integer, default=0, help="of the requests [default: 0]")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    command.add_argument("flags", nargs="*", metavar="FLAGS", help="of the server")


def measure(arguments: argparse.Namespace, progress: Progress) -> tuple[str, dict[str, object], int]:
    """Text, facts for JSON, and the exit code."""
    result = soak(
        arguments.model,
        num_requests=arguments.requests,
        clients=arguments.clients,
        compare=arguments.compare,
        seed=arguments.seed,
        flags=arguments.flags,
        announce=announce,
    )
    return report(result), to_json(result), 0 if result.is_well else EXIT_UNWELL
