"""`python -m jaxserve.bench`, which `scripts/bench` runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import announce, at_least_0, integer, positive, positive_number
from jaxserve.bench.peers import command as peers_command
from jaxserve.bench.picture import require_matplotlib
from jaxserve.bench.pressure import command as pressure_command
from jaxserve.bench.slow_clients import command as slow_clients_command
from jaxserve.bench.soak import command as soak_command
from jaxserve.bench.speculation import command as speculation_command
from jaxserve.config import QUANTIZATIONS, EngineConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.progress import BarProgress, Progress
from jaxserve.workload.reader import read_workload

EXIT_DISAGREE = 1
EXIT_BAD_INPUT = 2
_STEP_REPEATS = 15

_QUALITY = Path("workloads/quality")  # of a checkout, which is where `scripts/bench` is

Measured = tuple[str, dict[str, object], int]  # text, facts for JSON, exit code


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
        type=positive,
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
        type=positive,
        nargs="+",
        default=[2, 8, 16, 32, 64],
        metavar="N",
        help="[default: 2 8 16 32 64]",
    )
    growth = commands.add_parser(
        "growth",
        help="how a step's time grows with sequences, context and queue",
        description="Time decode steps of more and more sequences, of longer and longer contexts, and the host with "
        "more and more requests waiting, beside the least that reading and computing take. "
        "Exit codes: 0; 2 for bad input.",
    )
    _add_engine(growth)
    _add_formats(growth)
    growth.add_argument("--repeats", type=positive, metavar="K", help="runs of each step [default: 15]")
    for flag, default, what in (
        ("--sequences", [1, 2, 4, 8, 16, 32, 64], "running sequences"),
        ("--contexts", [64, 256, 512, 1024, 1536], "tokens of each sequence"),
        ("--queues", [0, 64, 256, 1024, 4096], "requests that wait"),
    ):
        least = at_least_0 if flag == "--queues" else positive
        shown = " ".join(map(str, default))
        growth.add_argument(
            flag, type=least, nargs="+", default=default, metavar="N", help=f"{what} [default: {shown}]"
        )
    growth.add_argument(
        "--at-sequences", type=positive, default=16, metavar="N", help="in the other sweeps [default: 16]"
    )
    growth.add_argument(
        "--at-context", type=positive, default=256, metavar="N", help="in the other sweeps [default: 256]"
    )
    growth.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, ...; needs matplotlib)"
    )
    scheduler = commands.add_parser(
        "scheduler",
        help="what the scheduler costs a step",
        description="Time the scheduler alone, with a stand-in for the device, in a full house whose members end and "
        "are replaced, with others waiting. Exit codes: 0; 2 for bad input.",
    )
    scheduler.add_argument(
        "--running",
        type=positive,
        nargs="+",
        default=[1, 16, 64, 128, 256],
        metavar="N",
        help="[default: 1 ... 256]",
    )
    scheduler.add_argument(
        "--waiting",
        type=at_least_0,
        nargs="+",
        default=[0, 1000, 10_000],
        metavar="N",
        help="[default: 0 1000 10000]",
    )
    scheduler.add_argument("--steps", type=positive, default=300, metavar="N", help="[default: 300]")
    scheduler.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    scheduler.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, ...; needs matplotlib)"
    )
    swap = commands.add_parser(
        "swap",
        help="moving KV blocks to host memory and back, against computing them again",
        description="Time the blocks of a prompt going to host memory and back, and the prompt's computation, in "
        "turn. The last line is ratio=X.X, computing over moving. Exit codes: 0; 2 for bad input.",
    )
    _add_engine(swap)
    _add_formats(swap)
    swap.add_argument("--tokens", type=positive, default=1000, metavar="N", help="[default: 1000]")
    swap.add_argument("--repeats", type=positive, default=7, metavar="K", help="[default: 7]")
    grammars = commands.add_parser(
        "grammars",
        help="how many JSON schemas answers can be kept to, and what that takes",
        description="Compile the schemas of a folder of MaskBench files (github.com/guidance-ai/jsonschemabench, "
        "maskbench/data) for the model's vocabulary, and run their instances through them. Exit codes: 0; 1 if "
        "something was accepted that a schema forbids; 2 for bad input.",
    )
    grammars.add_argument("folder", type=Path, metavar="FOLDER")
    grammars.add_argument("--model", default="smollm2", metavar="MODEL", help="[default: smollm2]")
    grammars.add_argument("--sample", type=positive, metavar="N", help="only N of them, always the same")
    grammars.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    quality = commands.add_parser(
        "quality",
        help="what smaller number formats cost in quality",
        description="Perplexity of a text, and agreement with float32's greedy answers, of float32, bfloat16 and int8 "
        "matrices, computed by the engine. Exit codes: 0; 2 for bad input.",
    )
    _add_engine(quality)
    quality.add_argument(
        "--text", type=Path, default=_QUALITY / "alice.txt", metavar="FILE", help="what to score"
    )
    quality.add_argument(
        "--prompts", type=Path, default=_QUALITY / "prompts.json", metavar="FILE", help="a JSON list of texts"
    )
    quality.add_argument(
        "--window", type=positive, default=1024, metavar="N", help="tokens scored together [default: 1024]"
    )
    quality.add_argument(
        "--bucket-plan",
        type=Path,
        default=_QUALITY / "shapes.json",
        metavar="FILE",
        help="shapes of every engine; few by default, because compiling them takes most of the time",
    )
    quality.add_argument("--limit", type=positive, metavar="N", help="only the first N windows and prompts")
    simulation = commands.add_parser(
        "simulation",
        help="how far jaxserve simulate is from the truth",
        description="Learn what steps cost from one made-up workload, run another by the clock, and simulate it: with "
        "what was learned up to its end, and with what was known beforehand. Exit codes: 0; 2 for bad input.",
    )
    _add_engine(simulation)
    _add_formats(simulation)
    simulation.add_argument("--requests", type=positive, default=60, metavar="N", help="[default: 60]")
    simulation.add_argument(
        "--rate", type=positive_number, default=2.0, metavar="R", help="requests a second [default: 2]"
    )
    simulation.add_argument("--seed", type=integer, default=0, help="of the workloads [default: 0]")
    simulation.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, ...; needs matplotlib)"
    )
    peers_command.add_command(commands)
    pressure_command.add_command(commands)
    soak_command.add_command(commands)
    speculation_command.add_command(commands)
    slow_clients_command.add_command(commands)
    return parser.parse_args(arguments)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    command.add_argument("--max-num-seqs", type=positive, metavar="N", help="of every engine")
    command.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="of every engine")
    command.add_argument("--max-model-len", type=positive, metavar="N", help="of every engine")
    command.add_argument(
        "--num-blocks",
        type=positive,
        metavar="N",
        help="KV blocks of each engine [default: enough]",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")


def _add_common(command: argparse.ArgumentParser) -> None:
    _add_engine(command)
    command.add_argument("--workload", type=Path, required=True, help="JSON file; see workloads/README.md")
    command.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    _add_formats(command)
    command.add_argument(
        "--repeats", type=positive, metavar="K", help="passes of each [default: 1; step: 15]"
    )


def _add_formats(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    command.add_argument("--quantization", choices=("none", *QUANTIZATIONS), default="none")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a command line; returns the exit code."""
    if arguments.command == "peers":
        return peers_command.run_command(arguments)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"{arguments.json}: there is no such folder")
    with BarProgress() as progress:
        text, facts, code = _MEASURE[arguments.command](arguments, progress)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")
    print(text)
    return code


def _options(arguments: argparse.Namespace, **formats: Any) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        num_blocks=arguments.num_blocks,
        **formats,
    )


def _formats(arguments: argparse.Namespace) -> dict[str, Any]:
    quantization = None if arguments.quantization == "none" else arguments.quantization
    return {"dtype": arguments.dtype, "quantization": quantization}


def _measure_static(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import static

    result = static.compare(
        arguments.model,
        read_workload(arguments.workload, limit=arguments.limit),
        _options(arguments, **_formats(arguments)),
        static_batch=arguments.static_batch,
        repeats=arguments.repeats or 1,
        progress=progress,
        announce=announce,
    )
    code = EXIT_DISAGREE if result.real_differences else 0
    return static.report(result), static.to_json(result), code


def _measure_deterministic(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import deterministic

    cost = deterministic.measure_cost(
        arguments.model,
        read_workload(arguments.workload, limit=arguments.limit),
        _options(arguments, **_formats(arguments)),
        repeats=arguments.repeats or 1,
        progress=progress,
        announce=announce,
    )
    return deterministic.report(cost), deterministic.to_json(cost), 0


def _measure_step(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import step

    times = step.measure_steps(
        arguments.model,
        read_workload(arguments.workload, limit=arguments.limit),
        _options(arguments, **_formats(arguments)),
        rows=tuple(arguments.rows),
        repeats=arguments.repeats or _STEP_REPEATS,
        progress=progress,
    )
    return step.report(times), step.to_json(times), 0


def _measure_growth(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import growth

    if arguments.plot is not None:
        require_matplotlib()
    result = growth.measure_growth(
        arguments.model,
        _options(arguments, **_formats(arguments)),
        growth.Sweeps(
            sequences=tuple(sorted(arguments.sequences)),
            contexts=tuple(sorted(arguments.contexts)),
            queues=tuple(sorted(arguments.queues)),
            at_sequences=arguments.at_sequences,
            at_context=arguments.at_context,
        ),
        repeats=arguments.repeats or _STEP_REPEATS,
        progress=progress,
    )
    if arguments.plot is not None:
        from jaxserve.bench.growth_plot import plot

        plot(result, arguments.plot)
    return growth.report(result), growth.to_json(result), 0


def _measure_scheduler(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import scheduler_cost

    if arguments.plot is not None:
        require_matplotlib()
    costs = scheduler_cost.measure_costs(
        tuple(sorted(arguments.running)), tuple(sorted(arguments.waiting)), steps=arguments.steps
    )
    if arguments.plot is not None:
        scheduler_cost.plot(costs, arguments.plot)
    return scheduler_cost.report(costs), scheduler_cost.to_json(costs, steps=arguments.steps), 0


def _measure_swap(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import swap

    times = swap.measure_swap(
        arguments.model,
        _options(arguments, **_formats(arguments)),
        num_tokens=arguments.tokens,
        repeats=arguments.repeats,
        progress=progress,
    )
    return swap.report(times), swap.to_json(times), 0


def _measure_quality(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import quality

    result = quality.measure_quality(
        arguments.model,
        quality.read_exam(arguments.text, arguments.prompts, window=arguments.window, limit=arguments.limit),
        _options(arguments, bucket_plan=str(arguments.bucket_plan)),
        max_windows=arguments.limit,
        progress=progress,
        announce=announce,
    )
    return quality.report(result), quality.to_json(result), 0


def _measure_grammars(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import grammars
    from jaxserve.checkpoint import open_checkpoint, resolve_model
    from jaxserve.model_store import default_store

    files = grammars.choose_files(arguments.folder, arguments.sample)
    checkpoint = open_checkpoint(resolve_model(arguments.model, store=default_store(), progress=progress))
    eos = checkpoint.generation.eos_token_ids
    figures = grammars.measure_grammars(files, checkpoint.load_tokenizer(), eos, progress)
    wrong = figures.instances[False, True]
    return grammars.report(figures), grammars.to_json(figures), EXIT_DISAGREE if wrong else 0


def _measure_simulation(arguments: argparse.Namespace, progress: Progress) -> Measured:
    from jaxserve.bench import simulation
    from jaxserve.workload.arrivals import Arrivals, Lengths
    from jaxserve.workload.generator import WorkloadSpec

    if arguments.plot is not None:
        require_matplotlib()
    check = simulation.check_simulation(
        arguments.model,
        _options(arguments, **_formats(arguments)),
        WorkloadSpec(
            num_requests=arguments.requests,
            arrivals=Arrivals(arguments.rate),
            prompt=Lengths(48, 0.8),
            output=Lengths(16, 0.6),
            context=512,
            chat_share=0.4,
            think_seconds=2.0,
        ),
        seed=arguments.seed,
        progress=progress,
        announce=announce,
    )
    if arguments.plot is not None:
        from jaxserve.bench.latency_plot import plot_latencies

        plot_latencies({"real": check.real, "simulated": check.learned[0].drive}, arguments.plot)
    return simulation.report(check), simulation.to_json(check), 0


_MEASURE: Mapping[str, Callable[[argparse.Namespace, Progress], Measured]] = {
    "static": _measure_static,
    "deterministic": _measure_deterministic,
    "step": _measure_step,
    "growth": _measure_growth,
    "scheduler": _measure_scheduler,
    "swap": _measure_swap,
    "pressure": pressure_command.measure,
    "soak": soak_command.measure,
    "slow-clients": slow_clients_command.measure,
    "speculation": speculation_command.measure,
    "quality": _measure_quality,
    "grammars": _measure_grammars,
    "simulation": _measure_simulation,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Errors that a person can mend are one line on stderr and code 2."""
    try:
        with _ending_what_was_started():
            return run(parse_arguments(arguments))
    except JaxserveError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return EXIT_BAD_INPUT


@contextlib.contextmanager
def _ending_what_was_started() -> Iterator[None]:
    """Signals would end this process at once, and leave the servers that it started."""
    before = {
        number: signal.signal(number, lambda number, frame: sys.exit(128 + number))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
