"""`scripts/bench speculation`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.bench.arguments import announce, positive
from jaxserve.bench.picture import require_matplotlib
from jaxserve.config import EngineConfig
from jaxserve.progress import Progress

_DESCRIPTION = (
    "Ask the same questions of an engine that speculates and of one that does not, in turn and in one process: texts "
    "that repeat their input, and open chat. Prints time per output token and acceptance. Exit codes: 0; 1 if any "
    "stream got other tokens in deterministic mode; 2 for bad input."
)
_TEXTS = Path("workloads/speculation.json")  # of a checkout, which is where `scripts/bench` is
EXIT_DISAGREE = 1


def add_command(commands: Any) -> None:
    """Add it to the subcommands of `scripts/bench`."""
    command = commands.add_parser(
        "speculation", help="what speculative decoding is worth", description=_DESCRIPTION
    )
    command.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    command.add_argument("--texts", type=Path, default=_TEXTS, metavar="FILE", help=f"[default: {_TEXTS}]")
    command.add_argument("--speculative", default="ngram", metavar="WHO", help="[default: ngram]")
    command.add_argument(
        "--num-speculative-tokens", type=positive, default=8, metavar="K", help="[default: 8]"
    )
    command.add_argument(
        "--streams",
        type=positive,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="[default: 1 4 16 64]",
    )
    command.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="[default: 128]")
    command.add_argument("--repeats", type=positive, default=3, metavar="N", help="[default: 3]")
    command.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    command.add_argument("--deterministic", action="store_true", help="both engines in deterministic mode")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")


def measure(arguments: argparse.Namespace, progress: Progress) -> tuple[str, dict[str, object], int]:
    """Text, facts for JSON, and the exit code."""
    # Imported here so that `scripts/bench --help` needs no jax.
    from jaxserve.bench.speculation.report import plot, report, to_json
    from jaxserve.bench.speculation.run import measure_speculation, read_texts

    if arguments.plot is not None:
        require_matplotlib()
    options = EngineConfig(
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=max(arguments.streams),
        deterministic=arguments.deterministic,
        speculative=arguments.speculative,
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    result = measure_speculation(
        arguments.model,
        options,
        read_texts(arguments.texts),
        streams=arguments.streams,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        progress=progress,
        announce=announce,
    )
    if arguments.plot is not None:
        plot(result, arguments.plot)
    differs = arguments.deterministic and any(cell.num_equal < cell.num_answers for cell in result.cells)
    return report(result), to_json(result), EXIT_DISAGREE if differs else 0
