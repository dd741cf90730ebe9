"""`jaxserve trace`: makes a workload up, or takes one from a public trace, and writes it to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ARRIVALS = "Arrivals"
_LENGTHS = "Lengths"
_KINDS = "Kinds of requests"


def _share(text: str, panel: str = _KINDS) -> typer.models.OptionInfo:
    return typer.Option(min=0.0, max=1.0, help=text, rich_help_panel=panel)


def trace(
    output: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="The file to write.", show_default=False)
    ],
    seed: Annotated[int, typer.Option(help="The same flags and seed give the same file.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    rate: Annotated[
        float, typer.Option(help="Mean requests a second, pauses included.", rich_help_panel=_ARRIVALS)
    ] = 1.0,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Deviation / mean of the times between arrivals: 1 is Poisson, more comes in clusters, 0 is a beat.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = 1.0,
    on_seconds: Annotated[
        float, typer.Option(help="Mean length of busy times.", rich_help_panel=_ARRIVALS)
    ] = 10.0,
    off_seconds: Annotated[
        float,
        typer.Option(help="Mean length of the pauses between them; 0 has none.", rich_help_panel=_ARRIVALS),
    ] = 0.0,
    prompt_median: Annotated[
        float,
        typer.Option(help="Tokens of a prompt, or of one turn of a chat.", rich_help_panel=_LENGTHS),
    ] = 128.0,
    prompt_sigma: Annotated[
        float, typer.Option(help="Spread: sigma of the lognormal distribution.", rich_help_panel=_LENGTHS)
    ] = 1.0,
    output_median: Annotated[
        float, typer.Option(help="Tokens of an answer.", rich_help_panel=_LENGTHS)
    ] = 64.0,
    output_sigma: Annotated[float, typer.Option(help="Its spread.", rich_help_panel=_LENGTHS)] = 0.8,
    context: Annotated[
        int, typer.Option(help="Most tokens of prompt and answer together.", rich_help_panel=_LENGTHS)
    ] = 2048,
    background_share: Annotated[float, _share("Requests of the background class.")] = 0.0,
    chat_share: Annotated[float, _share("Interactive requests that are turns of chats.")] = 0.0,
    turns: Annotated[float, typer.Option(help="Mean turns of a chat.", rich_help_panel=_KINDS)] = 4.0,
    think_seconds: Annotated[
        float, typer.Option(help="Least time between two turns' arrivals.", rich_help_panel=_KINDS)
    ] = 5.0,
    system_prompts: Annotated[
        int, typer.Option(help="How many system prompts chats begin with.", rich_help_panel=_KINDS)
    ] = 1,
    system_tokens: Annotated[int, typer.Option(help="Tokens of each of them.", rich_help_panel=_KINDS)] = 64,
    clients: Annotated[int, typer.Option(help="How many clients send.", rich_help_panel=_KINDS)] = 1,
    client_skew: Annotated[
        float,
        typer.Option(
            help="0: all alike; 1: the second half as much as the first, ...", rich_help_panel=_KINDS
        ),
    ] = 0.0,
    priorities: Annotated[int, typer.Option(help="Levels of priority.", rich_help_panel=_KINDS)] = 1,
    ttft_target: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token, for interactive requests.", rich_help_panel=_KINDS),
    ] = None,
    itl_target: Annotated[
        float | None,
        typer.Option(help="Seconds between tokens, for interactive requests.", rich_help_panel=_KINDS),
    ] = None,
    n_share: Annotated[float, _share("Requests with n of 2 to 4.")] = 0.0,
    stop_share: Annotated[float, _share("Requests with stop strings.")] = 0.0,
    sampled_share: Annotated[float, _share("Requests with a temperature and a seed.")] = 0.0,
    abort_share: Annotated[float, _share("Requests whose client goes away.")] = 0.0,
    abort_seconds: Annotated[
        float, typer.Option(help="Mean seconds until it does.", rich_help_panel=_KINDS)
    ] = 5.0,
    vocabulary: Annotated[
        tuple[int, int],
        typer.Option(metavar="FIRST STOP", help="Token ids of prompts: FIRST and up, below STOP."),
    ] = (100, 49152),
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Take the requests from a file (Azure's CSV, Mooncake's JSON lines, or any of ours) instead of "
            "making them up; then only --requests and --faster count.",
        ),
    ] = None,
    faster: Annotated[
        float, typer.Option(help="Let them come so many times as fast.", rich_help_panel=_ARRIVALS)
    ] = 1.0,
) -> None:
    """Write a workload: requests with their arrivals, lengths, classes and clients.

    Made up from a seed, or taken from a public trace. `jaxserve simulate` and scripts/bench run it. What a file holds:
    docs/experiments.md.

    \b
    Examples:
      jaxserve trace --seed 1 --requests 500 --rate 2 --chat-share 0.5 --background-share 0.3 --output mixed.jsonl
      jaxserve trace --from AzureLLMInferenceTrace_conv.csv --requests 1000 --faster 0.5 --output azure.jsonl
    """
    from jaxserve.request import ServiceTargets
    from jaxserve.workload.arrivals import Arrivals, Lengths
    from jaxserve.workload.generator import WorkloadSpec, generate
    from jaxserve.workload.reader import read_workload
    from jaxserve.workload.traced_request import TokenRange
    from jaxserve.workload.workload_file import write_workload

    if source is not None:
        workload = read_workload(source, limit=requests)
    else:
        spec = WorkloadSpec(
            num_requests=requests,
            arrivals=Arrivals(rate, burstiness, on_seconds, off_seconds),
            prompt=Lengths(prompt_median, prompt_sigma),
            output=Lengths(output_median, output_sigma),
            context=context,
            background_share=background_share,
            chat_share=chat_share,
            turns=turns,
            think_seconds=think_seconds,
            system_prompts=system_prompts,
            system_tokens=system_tokens,
            clients=clients,
            client_skew=client_skew,
            targets=ServiceTargets(ttft_target, itl_target),
            priorities=priorities,
            n_share=n_share,
            stop_share=stop_share,
            sampled_share=sampled_share,
            abort_share=abort_share,
            abort_seconds=abort_seconds,
            vocabulary=TokenRange(*vocabulary),
        )
        workload = generate(spec, seed, name=output.stem)
    workload = workload.faster(faster)
    write_workload(output, workload)
    print(
        f"{len(workload.requests)} requests in {workload.seconds:.1f} s, {workload.num_prompt_tokens} prompt tokens, "
        f"{workload.num_output_tokens} to generate; written to {output}"
    )
