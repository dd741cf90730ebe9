"""One table, for the terminal and as Markdown, and everything as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxserve.bench.environment import describe_host
from jaxserve.bench.peers.compare import Comparison, Pass, PeerResult
from jaxserve.bench.peers.figures import Figures
from jaxserve.bench.peers.peer import without_folders
from jaxserve.bench.peers.ready import Identity


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: medians over the passes. `scale` turns seconds into the unit."""

    name: str
    unit: str
    digits: int
    value: Callable[[Figures], float | None]
    scale: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


ROWS = (
    Row("output throughput", "tok/s", 1, lambda figures: figures.output_throughput),
    Row("time to first token, P50", "s", 3, lambda figures: figures.ttft_p50),
    Row("time to first token, P99", "s", 3, lambda figures: figures.ttft_p99),
    Row("inter-token, P50", "ms", 0, lambda figures: figures.inter_token_p50, 1e3),
    Row("inter-token, P99", "ms", 0, lambda figures: figures.inter_token_p99, 1e3),
    Row("... while prompts arrive, P99", "ms", 0, lambda figures: figures.inter_token_arriving_p99, 1e3),
    Row("tokens a chunk", "", 2, lambda figures: figures.tokens_per_chunk),
    Row("request latency, P50", "s", 2, lambda figures: figures.latency_p50),
    Row("request latency, P99", "s", 2, lambda figures: figures.latency_p99),
    Row("duration", "s", 1, lambda figures: figures.seconds),
)
_NOTHING = "-"


def table(comparison: Comparison) -> list[list[str]]:
    """Header and lines; the first column says what, the others are the peers'."""
    results = comparison.results
    passes = len(results[0].passes)
    title = f"median of {passes} passes" if passes > 1 else "one pass"
    lines = [[title, *(result.peer.name + ("" if result.is_whole else " (!)") for result in results)]]
    for row in ROWS:
        lines.append([row.label, *(_number(result.median(row.value), row) for result in results)])
    if passes > 1:
        lines.append(["lowest and highest throughput, tok/s", *map(_spread, results)])
    ready = [result.time_to_ready for result in results]
    lines.append(["time to ready, s", *(_NOTHING if value is None else f"{value:.1f}" for value in ready)])
    lines.append(["answers as ordered", *map(_whole, results)])
    return lines


def report(comparison: Comparison) -> str:
    """For the terminal."""
    lines = table(comparison)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "",
        heading(comparison),
        "",
        *(
            line[0].ljust(widths[0])
            + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
            for line in lines
        ),
    ]
    faults = fault_lines(comparison)
    return "\n".join([*text, *(["", "(!) not as ordered:", *faults] if faults else [])])


def markdown(comparison: Comparison) -> str:
    """The same as Markdown, with the commands and the machine."""
    header, *lines = (
        ["" if cell is None else cell.replace("|", "\\|") for cell in line] for line in table(comparison)
    )
    host = describe_host()
    machine = host["machine"]
    assert isinstance(machine, dict)
    text = [
        f"{heading(comparison)}; {str(host['date'])[:10]}, {machine['cores']} cores of {machine['cpu']}.",
        "",
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
        *(
            f"- {result.peer.name}{_version(result)}: `{result.peer.describe()}`"
            for result in comparison.results
        ),
    ]
    faults = fault_lines(comparison)
    return "\n".join([*text, *(["", "(!) not as ordered:", "", *faults] if faults else []), ""])


def heading(comparison: Comparison) -> str:
    workload = comparison.workload
    return (
        f"workload {workload.name}: {len(workload.requests)} requests, {comparison.load.describe()}, "
        f"{workload.num_prompt_tokens} prompt and {workload.num_output_tokens} output tokens, greedy, EOS ignored"
    )


def fault_lines(comparison: Comparison) -> list[str]:
    """A line for every peer, pass and kind of fault, with the first one in full."""
    lines = []
    for result in comparison.results:
        for number, one in enumerate(result.passes, start=1):
            where = f"- {result.peer.name}, pass {number}: "
            if one.failure is not None:
                lines.append(where + one.failure)
            lines += [where + text for text in _faults(one)]
    return lines


def _faults(one: Pass) -> list[str]:
    counts = Counter(answer.fault for answer in one.answers if answer.fault is not None)
    texts = []
    for fault, count in counts.items():
        index, first = next((i, answer) for i, answer in enumerate(one.answers) if answer.fault is fault)
        texts.append(
            f"{count} of {len(one.answers)} answers: {fault.value} (request {index}: {first.detail})"
        )
    return texts


def to_json(comparison: Comparison) -> dict[str, object]:
    """Everything but the texts."""
    workload = comparison.workload
    return {
        "benchmark": "peers",
        **describe_host(),
        "workload": {
            "name": workload.name,
            "requests": len(workload.requests),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
        },
        "load": asdict(comparison.load),
        "peers": [_peer_json(result) for result in comparison.results],
    }


def _peer_json(result: PeerResult) -> dict[str, object]:
    identity = _identity(result)
    return {
        "name": result.peer.name,
        "server": result.peer.describe(),
        "version": "" if identity is None else identity.version,
        "model": "" if identity is None else without_folders(identity.model),
        "time_to_ready": result.time_to_ready,
        "medians": {row.label: _rounded(result.median(row.value), row) for row in ROWS},
        "passes": [_pass_json(one) for one in result.passes],
    }


def _pass_json(one: Pass) -> dict[str, object]:
    figures = one.figures
    return {
        "time_to_ready": one.time_to_ready,
        "failure": one.failure,
        "faults": _faults(one),
        "figures": None if figures is None else asdict(figures),
    }


def _identity(result: PeerResult) -> Identity | None:
    return next((one.identity for one in result.passes if one.identity is not None), None)


def _version(result: PeerResult) -> str:
    identity = _identity(result)
    return f" {identity.version}" if identity is not None and identity.version else ""


def _number(value: float | None, row: Row) -> str:
    return _NOTHING if value is None else f"{value * row.scale:.{row.digits}f}"


def _rounded(value: float | None, row: Row) -> float | None:
    return None if value is None else round(value * row.scale, row.digits + 2)


def _spread(result: PeerResult) -> str:
    rates = [one.figures.output_throughput for one in result.passes if one.figures is not None]
    return f"{min(rates):.1f} - {max(rates):.1f}" if rates else _NOTHING


def _whole(result: PeerResult) -> str:
    figures = [one.figures for one in result.passes if one.figures is not None]
    if not figures:
        return "none"
    return f"{sum(one.whole for one in figures)} of {sum(one.requests for one in figures)}"
