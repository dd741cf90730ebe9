"""`scripts/bench peers`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import integer, positive, positive_number
from jaxserve.bench.peers.compare import Load, compare
from jaxserve.bench.peers.peer import choose_peers
from jaxserve.errors import ConfigError
from jaxserve.workload.reader import read_workload

EXIT_FAULTS = 1
_DESCRIPTION = (
    "Run one workload over HTTP against OpenAI-compatible servers, one after the other, with the same client, and "
    "print what each gave. A peer is NAME=http://HOST:PORT (runs already), NAME='cmd:COMMAND with {port}' (is started "
    "for each pass, waited for, and ended), or NAME='jaxserve:FLAGS of serve' (our own). Exit codes: 0; 1 if a peer "
    "failed or gave other answers than were ordered; 2 for bad input."
)


def add_command(commands: Any) -> None:
    """Add it to the subcommands of `scripts/bench`."""
    command = commands.add_parser(
        "peers", help="our server beside others, over HTTP", description=_DESCRIPTION
    )
    command.add_argument("--workload", type=Path, required=True, help="JSON file; see workloads/README.md")
    command.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    command.add_argument(
        "--peer", action="append", default=[], metavar="NAME=HOW", help="may be given several times"
    )
    command.add_argument(
        "--without-own",
        action="store_true",
        help="do not add our own server with its defaults, which otherwise happens where no peer is 'jaxserve:...'",
    )
    command.add_argument("--model", default="smollm2", help="of our own server [default: smollm2]")
    command.add_argument(
        "--rate", type=positive_number, metavar="R", help="requests a second (Poisson) [default: all at once]"
    )
    command.add_argument("--seed", type=integer, default=0, help="of the arrivals [default: 0]")
    command.add_argument(
        "--repeats", type=positive, default=1, metavar="K", help="passes of each [default: 1]"
    )
    command.add_argument(
        "--idle-timeout",
        type=positive_number,
        default=Load().idle_timeout_s,
        metavar="S",
        help="give a request up that gets nothing for so long [default: %(default)g]",
    )
    command.add_argument(
        "--ready-timeout",
        type=positive_number,
        default=Load().ready_timeout_s,
        metavar="S",
        help="time for a command to become ready [default: %(default)g]",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, ...; needs matplotlib)"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Carry it out; returns the exit code.

    Raises:
      ConfigError: bad input, found before anything is measured.
    """
    from jaxserve.bench.peers.plot import plot
    from jaxserve.bench.peers.report import markdown, report, to_json
    from jaxserve.bench.picture import require_matplotlib

    workload = read_workload(arguments.workload, limit=arguments.limit)
    peers = choose_peers(arguments.peer, model=arguments.model, with_own=not arguments.without_own)
    for path in (arguments.json, arguments.markdown, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
    if arguments.plot is not None:
        require_matplotlib()
    load = Load(arguments.rate, arguments.seed, arguments.idle_timeout, arguments.ready_timeout)
    result = compare(
        peers,
        workload,
        load,
        repeats=arguments.repeats,
        announce=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(result), indent=2) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(result))
    if arguments.plot is not None:
        plot(result, arguments.plot)
    print(report(result))
    return 0 if all(one.is_whole for one in result.results) else EXIT_FAULTS
