"""What a run found, as one JSON object and as a text to read (Markdown)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.gpu.jobs import NOT_RUN, OK, REFUSED, Outcome
from scripts.gpu.plan import BACKENDS

DECODE_KINDS = ("time_decode", "jax_decode", "torch_decode")
PREFILL_KINDS = ("time_prefill", "jax_prefill", "torch_prefill")


@dataclass
class Report:
    """Outcomes as they come in.

    Attributes:
      tuning: lines about what tuning chose, if it ran.
    """

    command: str
    outcomes: list[Outcome] = field(default_factory=list)
    tuning: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, section: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.section == section]

    def failures(self) -> list[str]:
        """Why the run as a whole failed; empty if all that ran is right."""
        lines = [f"{o.name}: {o.status}: {o.note}" for o in self.outcomes if o.fails_the_run]
        checked = [o for o in self.outcomes if o.is_check]
        for backend in BACKENDS:
            mine = [o for o in checked if o.case["backend"] == backend]
            if mine and not any(o.status == OK for o in mine):
                counts = dict(Counter(o.status for o in mine))
                lines.append(f"{backend}: not one check passed {counts}; the first says: {mine[0].note}")
        return lines


def to_json(report: Report) -> dict[str, Any]:
    """Everything, for machines; figures are SI units (seconds, bytes, operations)."""
    return {
        "command": report.command,
        "seconds": round(report.seconds, 1),
        "environment": _environment(report),
        "failures": report.failures(),
        "ceilings": _ceilings(report),
        "outcomes": [outcome.to_json() for outcome in report.outcomes],
        "tuning": report.tuning,
    }


def to_markdown(report: Report) -> str:
    """The same, to be read: environment, correctness, engine, speed, and what did not run."""
    parts = [
        f"# {_title(report)}",
        _environment_lines(report),
        "## Correctness",
        _correctness(report),
        "## Engine on a random model, tokens against our XLA attention's",
        _engine(report),
        "## Decode attention, GB/s (share of a device copy)",
        _speed(report, DECODE_KINDS, ("batch", "context"), "bytes_per_s", 1e9, "copy"),
        "## Prefill attention, TFLOP/s (share of a large bf16 product)",
        _speed(report, PREFILL_KINDS, ("chunk", "context"), "flops_per_s", 1e12, "matmul"),
        "## A whole decode step",
        _steps(report),
    ]
    if report.tuning:
        parts += ["## Tuning", "\n".join(f"- {line}" for line in report.tuning)]
    parts += ["## What has no result", _without_result(report)]
    return "\n\n".join(parts) + "\n"


def _title(report: Report) -> str:
    failures = report.failures()
    return f"GPU check: {len(failures)} failures" if failures else "GPU check: no failure"


def _environment(report: Report) -> dict[str, Any]:
    found = report.of("environment")
    return dict(found[0].data) if found else {}


def _environment_lines(report: Report) -> str:
    facts = {**_environment(report), "command": report.command, "seconds": round(report.seconds)}
    ceilings = _ceilings(report)
    if "copy" in ceilings:
        facts["device copy"] = f"{ceilings['copy'] / 1e9:.0f} GB/s (read + written)"
    if "matmul" in ceilings:
        facts["bf16 product"] = f"{ceilings['matmul'] / 1e12:.0f} TFLOP/s"
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _ceilings(report: Report) -> dict[str, float]:
    """Bytes and operations a second of the "copy" and "matmul" cases, if they ran."""
    keys = {"copy": "bytes_per_s", "matmul": "flops_per_s"}
    return {
        o.case["kind"]: o.data[keys[o.case["kind"]]]
        for o in report.outcomes
        if o.case["kind"] in keys and o.data
    }


def _correctness(report: Report) -> str:
    rows = []
    for backend in BACKENDS:
        mine = [o for o in report.of("correctness") if o.case["backend"] == backend]
        for dtype in ("float32", "bfloat16", "float16"):
            some = [o for o in mine if o.case["dtype"] == dtype]
            if not some:
                continue
            counts = Counter(o.status for o in some)
            errors = [o.data["error"] for o in some if o.status == OK]
            worst = f"{max(errors):.1e}" if errors else "-"
            bad = sum(o.fails_the_run for o in some)
            rows.append((backend, dtype, counts[OK], bad, counts[REFUSED], counts[NOT_RUN], worst))
    lines = [
        _table(("backend", "dtype", "right", "failed", "refused", "not run", "largest relative error"), rows)
    ]
    lines += [f"- **{line}**" for line in report.failures()]
    return "\n\n".join([lines[0], "\n".join(lines[1:])]) if lines[1:] else lines[0]


def _engine(report: Report) -> str:
    rows = [
        (
            o.name,
            o.status,
            f"{o.data['tokens_compared']} of {o.data['tokens']}" if o.data else "-",
            o.data.get("ended_at_near_tie", "-"),
            f"{o.data['largest_difference']:.1e}" if o.data else "-",
        )
        for o in report.of("engine")
    ]
    return _table(
        ("engine", "result", "tokens equal", "ended at a near-tie", "largest difference of logprobs"), rows
    )


def _speed(
    report: Report,
    kinds: Sequence[str],
    shape: Sequence[str],
    figure: str,
    unit: float,
    ceiling: str,
) -> str:
    """A row a shape, a column a backend (and a quantised cache)."""
    found = [o for o in report.outcomes if o.case["kind"] in kinds]
    columns = list(dict.fromkeys(_column(o) for o in found))
    best = _ceilings(report).get(ceiling)

    def cell(o: Outcome) -> str:
        if o.status != OK:
            return o.status
        share = f" ({o.data[figure] / best:.0%})" if best else ""
        return f"{_rounded(o.data[figure] / unit)}{share}"

    cells = {(tuple(o.case[key] for key in shape), _column(o)): cell(o) for o in found}
    rows = [
        (*key, *(cells.get((key, column), "-") for column in columns))
        for key in sorted({key for key, _ in cells})
    ]
    return _table((*shape, *columns), rows)


def _column(outcome: Outcome) -> str:
    case = outcome.case
    return f"{case['backend']}, {case['kv_dtype']} cache" if "kv_dtype" in case else str(case["backend"])


def _steps(report: Report) -> str:
    copy = _ceilings(report).get("copy")
    rows = []
    for o in report.outcomes:
        if o.case["kind"] != "step":
            continue
        if o.status != OK:
            rows.append((o.name, o.status, "-", "-", "-"))
            continue
        floor = o.data["floor_bytes"] / copy if copy else None
        rows.append(
            (
                f"{o.name} ({o.data['ran_on']})",
                f"{o.data['seconds'] * 1e3:.2f}",
                f"{floor * 1e3:.2f}" if floor else "-",
                f"{o.data['seconds'] / floor:.2f}" if floor else "-",
                f"{o.data['tokens_per_s']:.0f}",
            )
        )
    lines = [_table(("step", "ms", "floor, ms", "times the floor", "tokens/s"), rows)]
    for o in report.outcomes:
        if o.case["kind"] == "host_gap" and o.status == OK:
            lines.append(
                f"Host: {o.data['host_seconds'] * 1e3:.3f} ms of a {o.data['step_seconds'] * 1e3:.2f} ms step, for "
                f"{o.data['host_gap_seconds'] * 1e3:.3f} ms of which the device waited; with overlap a step takes "
                f"{o.data['overlap_step_seconds'] * 1e3:.2f} ms, and the device waits for "
                f"{o.data['overlap_host_gap_seconds'] * 1e3:.3f} ms. {o.data['recompilations']} recompilations."
            )
    return "\n\n".join(lines)


def _without_result(report: Report) -> str:
    """Refusals and omissions, equal reasons together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for o in report.outcomes:
        if o.status != OK and not o.fails_the_run:
            reasons.setdefault((o.status, o.note), []).append(o.name)
    return (
        "\n".join(f"- {status}: {_some(names)}: {note}" for (status, note), names in reasons.items())
        or "- nothing"
    )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    rows = list(rows)
    if not rows:
        return "Nothing was run."
    line: Callable[[Sequence[Any]], str] = lambda cells: "| " + " | ".join(map(str, cells)) + " |"  # noqa: E731
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])
