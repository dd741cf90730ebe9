"""`python -m jaxserve.bench`, which `scripts/bench` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench.peers.command import add_command, run_command
from jaxserve.bench.workload import read_workload
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.progress import BarProgress

EXIT_DISAGREE = 1
EXIT_BAD_INPUT = 2
_STEP_REPEATS = 15


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with code 2 and a line on stderr if it makes no sense."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure jaxserve.")
    commands = parser.add_subparsers(dest="command", required=True)
    static = commands.add_parser(
        "static",
        help="continuous against static batching",
        description="Run one workload with continuous and with static batching, in turn and in one process, and "
        "print what each took. The last line is ratio=X.XX, continuous over static output tokens a second. "
        "Exit codes: 0; 1 if the two gave different tokens (near-ties aside); 2 for bad input.",
    )
    _add_common(static)
    static.add_argument(
        "--static-batch",
        type=_positive,
        metavar="N",
        help="batch size of static alone [default: max-num-seqs]",
    )
    deterministic = commands.add_parser(
        "deterministic",
        help="what deterministic mode costs",
        description="Run one workload with and without deterministic mode, in turn and in one process. The last line "
        "is ratio=X.XXX, deterministic over default output tokens a second. Exit codes: 0; 2 for bad input.",
    )
    _add_common(deterministic)
    step = commands.add_parser(
        "step",
        help="where the time of a step goes",
        description="Time the programs of steps in which the first N requests of a workload decode, half done: "
        "attention, the rest of the layers, the end (logits and sampling), the host. Exit codes: 0; 2 for bad input.",
    )
    _add_common(step)
    step.add_argument(
        "--rows",
        type=_positive,
        nargs="+",
        default=[2, 8, 16, 32, 64],
        metavar="N",
        help="[default: 2 8 16 32 64]",
    )
    add_command(commands)
    return parser.parse_args(arguments)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workload", type=Path, required=True, help="JSON file; see workloads/README.md")
    command.add_argument("--limit", type=_positive, metavar="N", help="only the first N requests")
    command.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    command.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    command.add_argument("--max-num-seqs", type=_positive, metavar="N", help="of both engines")
    command.add_argument("--max-num-batched-tokens", type=_positive, metavar="N", help="of both engines")
    command.add_argument("--max-model-len", type=_positive, metavar="N", help="of both engines")
    command.add_argument(
        "--num-gpu-blocks-override",
        type=_positive,
        metavar="N",
        help="KV blocks of each engine [default: enough that no request is preempted]",
    )
    command.add_argument(
        "--repeats", type=_positive, metavar="K", help="passes of each [default: 1; step: 15]"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a command line; returns the exit code."""
    if arguments.command == "peers":
        return run_command(arguments)
    workload = read_workload(arguments.workload, limit=arguments.limit)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"{arguments.json}: there is no such folder")
    from jaxserve.bench import deterministic, static, step

    options = EngineConfig(
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        num_blocks=arguments.num_gpu_blocks_override,
    )
    announce = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    repeats = arguments.repeats or 1
    with BarProgress() as progress:
        if arguments.command == "step":
            times = step.measure_steps(
                arguments.model,
                workload,
                options,
                rows=tuple(arguments.rows),
                repeats=arguments.repeats or _STEP_REPEATS,
                progress=progress,
            )
            text, facts, code = step.report(times), step.to_json(times), 0
        elif arguments.command == "deterministic":
            cost = deterministic.measure_cost(
                arguments.model,
                workload,
                options,
                repeats=repeats,
                progress=progress,
                announce=announce,
            )
            text, facts, code = deterministic.report(cost), deterministic.to_json(cost), 0
        else:
            result = static.compare(
                arguments.model,
                workload,
                options,
                static_batch=arguments.static_batch,
                repeats=repeats,
                progress=progress,
                announce=announce,
            )
            text, facts = static.report(result), static.to_json(result)
            code = EXIT_DISAGREE if result.real_differences else 0
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")
    print(text)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Errors that a person can mend are one line on stderr and code 2."""
    try:
        return run(parse_arguments(arguments))
    except JaxserveError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
