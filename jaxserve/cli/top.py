"""`jaxserve top`: what a running server does, in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Annotated

import typer

from jaxserve.cli.chat import printable
from jaxserve.cli.metrics_snapshot import Interval, Snapshot, take_snapshot
from jaxserve.cli.server_url import server_base
from jaxserve.cli.top_frame import frame
from jaxserve.errors import JaxserveError

WINDOW_SECONDS = 60.0  # that percentiles are of


def top(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="Of the server.")] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks, which rates are of.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, after one interval, and end.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JAXSERVE_API_KEY",
            show_envvar=True,
            help="Sent along; a server's /metrics is open, but what stands before it may want one.",
        ),
    ] = None,
) -> None:
    """Watch a running server: throughput, queues, latencies, cache, packing, refusals. Ctrl-C ends it.

    Reads /metrics. Percentiles are of the last minute, and as exact as the histograms there. Where the output is no
    terminal, one frame is printed below the other.

    \b
    Examples:
      jaxserve top
      jaxserve top http://gpu-machine:8000 --interval 5
      jaxserve top --once
    """
    url = server_base(url)
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    console = Console()
    looks = _looks(url, api_key, interval)
    shown: RenderableType = frame(url, *next(looks))
    if once:
        console.print(shown)
        return
    live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        while True:
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            try:
                shown = frame(url, *next(looks))
            except JaxserveError as error:
                shown = Text(printable(f"{error}; trying again"))
                looks = _again(url, api_key, interval)


def _looks(url: str, api_key: str | None, interval: float) -> Iterator[tuple[Interval, Interval]]:
    """What happened since the last look, and in the window, again and again.

    Raises:
      ConfigError: nobody answers.
    """
    kept: deque[Snapshot] = deque([take_snapshot(url, api_key)])
    while True:
        time.sleep(interval)
        kept.append(take_snapshot(url, api_key))
        now = Interval(kept[-2], kept[-1])
        if now.is_restart:
            kept = deque([kept[-1]])
            continue
        while len(kept) > 2 and kept[-1].time - kept[1].time >= WINDOW_SECONDS:
            kept.popleft()
        yield now, Interval(kept[0], kept[-1])


def _again(url: str, api_key: str | None, interval: float) -> Iterator[tuple[Interval, Interval]]:
    """After the server has gone away: wait a while first."""
    time.sleep(interval)
    yield from _looks(url, api_key, interval)
