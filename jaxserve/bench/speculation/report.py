"""What speculation was worth, as a table, as JSON and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.picture import new_figure, save
from jaxserve.bench.speculation.run import OFF, ON, Cell, Result


def report(result: Result) -> str:
    """The result as text."""
    config = result.config
    lines = [
        "",
        f"{result.model}, {config.dtype}; {config.speculative}, at most {config.num_speculative_tokens} drafts a step; "
        f"up to {result.max_tokens} tokens an answer",
        f"{'texts':<8}{'streams':>8}{'ms/token':>10}{'with':>8}{'speed-up':>10}{'whole pass':>12}{'accepted':>10}"
        f"{'equal':>8}",
    ]
    for cell in result.cells:
        accepted = "-" if cell.acceptance is None else f"{cell.acceptance:.0%}"
        lines.append(
            f"{cell.texts.name:<8}{cell.streams:>8}{cell.milliseconds(OFF):>10.1f}{cell.milliseconds(ON):>8.1f}"
            f"{cell.speedup:>9.2f}x{cell.throughput_ratio:>11.2f}x{accepted:>10}"
            f"{cell.num_equal:>5}/{cell.num_answers}"
        )
    return "\n".join(lines)


def to_json(result: Result) -> dict[str, object]:
    """Everything but the tokens."""
    return {
        "benchmark": "speculation",
        **describe_environment(),
        "model": result.model,
        "config": asdict(result.config),
        "max_tokens": result.max_tokens,
        "cells": [_cell(cell) for cell in result.cells],
    }


def plot(result: Result, path: Path) -> None:
    """Speed-up by number of streams; the suffix of `path` decides the format.

    Raises:
      ConfigError: matplotlib is missing, or there is no such format.
    """
    figure = new_figure(width=6, height=3.4)
    axes = figure.subplots()
    for name in dict.fromkeys(cell.texts.name for cell in result.cells):
        cells = [cell for cell in result.cells if cell.texts.name == name]
        axes.plot([c.streams for c in cells], [c.speedup for c in cells], marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("time per token, without / with")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _cell(cell: Cell) -> dict[str, object]:
    return {
        "texts": cell.texts.name,
        "streams": cell.streams,
        "speedup": round(cell.speedup, 4),
        "throughput_ratio": round(cell.throughput_ratio, 4),
        "acceptance": cell.acceptance,
        "equal_answers": cell.num_equal,
        "answers": cell.num_answers,
        "passes": {
            name: [
                {
                    "seconds": round(made.seconds, 3),
                    "seconds_per_token": round(made.seconds_per_token, 5),
                    "steps": made.steps,
                    "output_tokens": sum(map(len, made.token_ids)),
                    "draft_tokens": made.draft_tokens,
                    "accepted_tokens": made.accepted_tokens,
                }
                for made in cell.passes[name]
            ]
            for name in (OFF, ON)
        },
    }
