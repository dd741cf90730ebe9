"""One frame of `jaxserve top`, of what a server's metrics say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.cli.chat import printable
from jaxserve.cli.metrics_snapshot import Interval

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LATENCIES = (
    ("first token", "vllm:time_to_first_token_seconds"),
    ("between tokens", "vllm:inter_token_latency_seconds"),
    ("queue", "vllm:request_queue_time_seconds"),
    ("whole request", "vllm:e2e_request_latency_seconds"),
)
_SHARES = (0.5, 0.9, 0.99)


def frame(url: str, now: Interval, window: Interval) -> Group:
    """What is shown.

    Args:
      now: since the last frame: rates.
      window: of some more time: percentiles, and shares.
    """
    from rich.console import Group
    from rich.text import Text

    models = ", ".join(_models(now))
    head = Text.assemble(("jaxserve top", "bold"), printable(f"  {url}  {models}"))
    return Group(head, _load(now), _latencies(window), _work(now, window))


def _models(now: Interval) -> list[str]:
    return [name for name in now.after.by("model_name", "vllm:num_requests_running") if name]


def _load(now: Interval) -> Table:
    last = now.after
    table = _table("requests", "running", "waiting", "ended/s")
    ended = now.rate("vllm:request_success_total")
    _row(
        table,
        "all",
        _count(last.value("vllm:num_requests_running")),
        _count(last.value("vllm:num_requests_waiting")),
        f"{ended:.1f}",
    )
    running, waiting = last.by("class", "jaxserve:running"), last.by("class", "jaxserve:waiting")
    for name in running:
        _row(table, name, _count(running[name]), _count(waiting.get(name, 0.0)), "")
    return table


def _latencies(window: Interval) -> Table:
    table = _table(f"last {window.seconds:.0f} s", *(f"P{share * 100:g}" for share in _SHARES))
    for title, name in _LATENCIES:
        _row(table, title, *(_seconds(window.percentile(name, share)) for share in _SHARES))
    return table


def _work(now: Interval, window: Interval) -> Table:
    last = now.after
    table = _table("", "")
    steps = now.growth("jaxserve:steps_total")
    _row(table, "generated tokens/s", f"{now.rate('vllm:generation_tokens_total'):.1f}")
    _row(table, "prompt tokens/s", f"{now.rate('vllm:prompt_tokens_total'):.1f}")
    _row(table, "steps/s", f"{steps / now.seconds:.1f}")
    _row(table, "time a step", _seconds(now.growth("jaxserve:step_seconds_total") / steps if steps else None))
    _row(table, "KV cache in use", f"{last.value('vllm:kv_cache_usage_perc'):.1%}")
    hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    _row(table, "prefix cache hits", _share(window.growth(hits), window.growth(queries)))
    useful, padded = "jaxserve:useful_tokens_total", "jaxserve:padded_tokens_total"
    _row(table, "packing efficiency", _share(window.growth(useful), window.growth(padded)))
    _row(table, "preemptions", _count(last.value("vllm:num_preemptions_total")))
    refused = {
        reason: count for reason, count in last.by("reason", "jaxserve:refusals_total").items() if count
    }
    details = ", ".join(f"{reason} {count:.0f}" for reason, count in refused.items())
    _row(table, "refusals", _count(sum(refused.values())) + (f" ({details})" if refused else ""))
    states = [state for state, value in last.by("state", "jaxserve:circuit_breaker").items() if value]
    _row(table, "circuit breaker", ", ".join(states) or "-")
    return table


def _table(first: str, *columns: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_header=bool(first), pad_edge=False)
    table.add_column(first, min_width=20)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _row(table: Table, *cells: str) -> None:
    """Cells are plain text: what a server says is no markup, and steers no terminal."""
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) for cell in cells))


def _count(value: float) -> str:
    return f"{value:.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
