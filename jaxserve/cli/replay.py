"""`jaxserve replay`: does an engine do again what was recorded?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from jaxserve.recording.event_reader import Recording

EXIT_DIFFERENT = 1


def replay(
    recording: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `serve --record` wrote.", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option(help="Where the model is [default: where it was].", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="Simulate the recorded arrivals under this policy instead, beside the recorded one.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Do a recording over again, and say where something differs.

    Makes the recorded engine once more and feeds it the same requests and aborts at the same steps, with the
    recorded clock. Every decision (who runs, how many tokens, in which slot, blocks and shape, who is preempted) and
    every token is compared. Exit codes: 0 all the same; 1 something differs, with the step and the request; 2 for
    bad input, or an engine that can't be made the same here.

    With --policy nothing is computed: arrivals, lengths and step times are the recording's, and both policies run
    in simulated time. Prints where the other one first departs, and both latencies.

    \b
    Example:
      jaxserve serve --model smollm2 --record traffic.jsonl
      jaxserve replay traffic.jsonl
    """
    from jaxserve.progress import BarProgress
    from jaxserve.recording.engine_description import versions
    from jaxserve.recording.event_reader import open_recording
    from jaxserve.replay import replay_recording

    opened = open_recording(recording)
    if policy is not None:
        _compare(opened, policy)
        return 0
    recorded = opened.header.engine.versions
    others = [f"{k} {v} (recorded: {recorded.get(k)})" for k, v in versions().items() if recorded.get(k) != v]
    if others:
        print(f"warning: other versions here: {', '.join(others)}", file=sys.stderr)
    with BarProgress() as progress:
        report = replay_recording(opened, model, progress)
    if not report.is_whole and report.difference is None:
        print("the recording does not go on to its engine's end", file=sys.stderr)
    done = f"{report.steps} steps, {report.requests} requests, {report.tokens} tokens"
    if report.difference is not None:
        print(f"differs at {report.difference}\nthe same before: {done}")
        return EXIT_DIFFERENT
    print(f"the same: {done}")
    return 0


def _compare(recording: Recording, policy: str) -> None:
    from jaxserve.replay import compare_policies
    from jaxserve.simulation.latencies import percentiles, summarise, table

    result = compare_policies(recording, policy)
    if result.departure is None:
        print(f"{policy} decides the same in all {result.recorded.steps} steps")
    else:
        print(f"{policy} departs at step {result.departure}: {result.row}")
    actual = percentiles(ttft for ttft in result.traffic.ttfts if ttft is not None)
    shown = ", ".join(f"P{percent} {seconds:.3f} s" for percent, seconds in actual.items())
    print(f"\nas recorded, TTFT: {shown}\n\nthe recorded policy, simulated:")
    print(table(summarise(result.recorded)))
    print(f"\n{policy}, simulated:")
    print(table(summarise(result.other)))
