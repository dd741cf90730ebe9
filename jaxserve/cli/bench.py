"""`jaxserve bench`: how fast an engine or a server is, and whether it became faster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli import engine_options as options
from jaxserve.cli.finite_numbers import finite_numbers

if TYPE_CHECKING:
    from jaxserve.bench.serve.goal import Goal
    from jaxserve.bench.serve.load import ServeLoad
    from jaxserve.bench.serve.measure import Measured, Target
    from jaxserve.workload.traced_request import Workload

EXIT_FAULTS = 1
_REQUESTS = "Requests"
_LOAD = "Load"

WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Take requests from a file: of `jaxserve trace`, Azure's CSV, Mooncake's JSON lines, or a JSON list "
        "[default: random ones].",
        rich_help_panel=_REQUESTS,
        show_default=False,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many [default: 100 random ones, or all of the file].",
        rich_help_panel=_REQUESTS,
        show_default=False,
    ),
]
PromptMedian = Annotated[float, typer.Option(help="Tokens of a random prompt.", rich_help_panel=_REQUESTS)]
PromptSigma = Annotated[
    float,
    typer.Option(
        help="Spread: sigma of the lognormal distribution; 0: all alike.", rich_help_panel=_REQUESTS
    ),
]
OutputMedian = Annotated[float, typer.Option(help="Tokens of an answer to one.", rich_help_panel=_REQUESTS)]
OutputSigma = Annotated[float, typer.Option(help="Their spread.", rich_help_panel=_REQUESTS)]
Context = Annotated[
    int, typer.Option(help="Most tokens of a random prompt and its answer.", rich_help_panel=_REQUESTS)
]
Seed = Annotated[int, typer.Option(help="Of random requests and of arrivals.", rich_help_panel=_REQUESTS)]
Url = Annotated[str, typer.Option(help="Of the server, with or without /v1.")]
Model = Annotated[
    str | None, typer.Option(help="What requests name [default: the server's first].", show_default=False)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY", show_envvar=True, help="Key that the server wants.", show_default=False
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0,
        max=20,
        help="Deviation / mean of the times between arrivals: 1 is Poisson, more comes in clusters, 0 is a beat.",
        rich_help_panel=_LOAD,
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS",
        help="What an answer must keep to count for goodput: ttft:200, tpot:50, e2e:3000, in milliseconds; several "
        "times, or several in one text [default: that it is whole].",
        show_default=False,
    ),
]
IdleTimeout = Annotated[
    float, typer.Option(min=0.001, help="Seconds without a byte after which a request is given up.")
]
ReadyTimeout = Annotated[float, typer.Option(min=0.001, help="Seconds that the server has to answer at all.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result there as well.", show_default=False),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw it (.png, .svg, ...; needs matplotlib).", show_default=False),
]


def throughput(
    model: options.Model,
    workload: WorkloadFile = None,
    requests: Requests = None,
    prompt_median: PromptMedian = 128.0,
    prompt_sigma: PromptSigma = 0.5,
    output_median: OutputMedian = 64.0,
    output_sigma: OutputSigma = 0.5,
    context: Context = 1024,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes, of which the medians count.")] = 1,
    dtype: options.DType = options.DTypeChoice.auto,
    quantization: options.Quantization = options.QuantizationChoice.none,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    num_blocks: options.NumBlocks = "auto",
    attention_backend: options.AttentionBackend = "auto",
    deterministic: options.Deterministic = False,
    json_file: JsonFile = None,
) -> None:
    """Give an engine in this process everything at once, and print what it took.

    Prefix caching is off, so that a second pass computes what the first did. Exit codes: 0; 2 for bad input.

    \b
    Example:
      jaxserve bench throughput --model smollm2 --requests 64 --json before.json
    """
    from jaxserve.bench.serve.report import describe_figures, result_of, write_result
    from jaxserve.bench.serve.throughput import figures_of_runs, measure_throughput, spread
    from jaxserve.config import EngineConfig
    from jaxserve.engine_factory import create_engine
    from jaxserve.progress import BarProgress

    items = _workload(
        workload, requests, seed, context, (prompt_median, prompt_sigma), (output_median, output_sigma)
    )
    _check_files(json_file)
    config = EngineConfig(
        dtype=dtype.value,
        quantization=options.quantization_of(quantization),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=options.num_blocks_of(num_blocks),
        attention_backend=attention_backend,
        deterministic=deterministic,
        enable_prefix_caching=False,
        max_waiting=max(len(items.requests), 4096),
    )
    with BarProgress() as progress:
        engine = create_engine(model, config, progress=progress)
    try:
        runs = measure_throughput(engine, items, repeats)
        server = {"model": engine.model_name, "dtype": engine.config.dtype}
    finally:
        engine.close()
    figures = figures_of_runs(runs)
    found = {"figures": figures, "spread": spread(runs)}
    write_result(json_file, result_of("throughput", items, server, found))
    print(
        f"{len(items.requests)} requests at once, median of {len(runs)} passes\n\n{describe_figures(figures)}"
    )


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    api_key: ApiKey = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second [default: all at once].", rich_help_panel=_LOAD, show_default=False
        ),
    ] = None,
    burstiness: Burstiness = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most requests under way; the next is sent as one ends [default: any number].",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Requests come when the file says, so many times as fast.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    workload: WorkloadFile = None,
    requests: Requests = None,
    prompt_median: PromptMedian = 128.0,
    prompt_sigma: PromptSigma = 0.5,
    output_median: OutputMedian = 64.0,
    output_sigma: OutputSigma = 0.5,
    context: Context = 1024,
    seed: Seed = 0,
    goodput: Goodput = None,
    idle_timeout: IdleTimeout = 600.0,
    ready_timeout: ReadyTimeout = 10.0,
    json_file: JsonFile = None,
) -> int:
    """Put one load on a server with the OpenAI API, ours or another, and print what its clients saw.

    Requests go to /v1/completions as token ids, streamed, greedy, with the end of text ignored, so that every server
    makes as many tokens. Times begin when a request is sent: with --concurrency, what waits for its turn here does not
    count. Exit codes: 0; 1 if an answer was refused, broken off or other than ordered (they are counted, and never
    for goodput); 2 for bad input, or no server.

    \b
    Examples:
      jaxserve bench serve --rate 4 --burstiness 2 --goodput "ttft:500 tpot:100" --json a.json
      jaxserve bench serve --url http://other:8000 --concurrency 16 --workload mixed.jsonl
    """
    from jaxserve.bench.serve.load import ServeLoad
    from jaxserve.bench.serve.report import describe

    load = ServeLoad(rate, burstiness, concurrency, recorded, seed)
    if recorded is not None and workload is None:
        raise typer.BadParameter("--recorded needs --workload: random requests have no times of their own")
    items = _workload(
        workload, requests, seed, context, (prompt_median, prompt_sigma), (output_median, output_sigma)
    )
    target, goal = _target(url, model, api_key, idle_timeout), _goal(goodput)
    [point] = _measure("serve", target, ready_timeout, [items], [load], goal, json_file, None)
    print(describe(point))
    return 0 if point.is_whole else EXIT_FAULTS


def sweep(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    api_key: ApiKey = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second; several times.", rich_help_panel=_LOAD, show_default=False),
    ] = None,
    burstiness: Burstiness = 1.0,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests under way; several times.", rich_help_panel=_LOAD, show_default=False
        ),
    ] = None,
    workload: WorkloadFile = None,
    requests: Requests = None,
    prompt_median: PromptMedian = 128.0,
    prompt_sigma: PromptSigma = 0.5,
    output_median: OutputMedian = 64.0,
    output_sigma: OutputSigma = 0.5,
    context: Context = 1024,
    seed: Seed = 0,
    goodput: Goodput = None,
    idle_timeout: IdleTimeout = 600.0,
    ready_timeout: ReadyTimeout = 10.0,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> int:
    """The same as `serve`, at several loads one after the other.

    A server with a prefix cache knows a file's prompts from the second load on; random ones are new for each. Exit
    codes: those of `serve`.

    \b
    Example:
      jaxserve bench sweep --rate 1 --rate 2 --rate 4 --goodput ttft:500 --json sweep.json --plot sweep.png
    """
    from jaxserve.bench.picture import require_matplotlib
    from jaxserve.bench.serve.load import ServeLoad
    from jaxserve.bench.serve.report import describe_sweep

    if bool(rate) == bool(concurrency):
        raise typer.BadParameter("name several --rate, or several --concurrency")
    loads = [ServeLoad(one, burstiness, seed=seed) for one in rate or ()]
    loads += [ServeLoad(concurrency=one, seed=seed) for one in concurrency or ()]
    if plot is not None:
        require_matplotlib()
    lengths = (prompt_median, prompt_sigma), (output_median, output_sigma)
    each = [_workload(workload, requests, seed + place, context, *lengths) for place in range(len(loads))]
    target, goal = _target(url, model, api_key, idle_timeout), _goal(goodput)
    points = _measure("sweep", target, ready_timeout, each, loads, goal, json_file, plot)
    print(describe_sweep(points))
    return 0 if all(point.is_whole for point in points) else EXIT_FAULTS


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A result.", show_default=False)],
    second: Annotated[
        Path, typer.Argument(metavar="B.json", help="Another of the same kind.", show_default=False)
    ],
) -> None:
    """Two results that --json wrote: every figure of both, the second over the first, and what else differs.

    Exit codes: 0; 2 if they can't be compared.

    \b
    Example:
      jaxserve bench compare before.json after.json
    """
    from jaxserve.bench.serve.compare import compare as compare_results
    from jaxserve.bench.serve.compare import read_result

    print(compare_results(read_result(first), read_result(second)))


def build_bench() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        name="bench",
        help="Measure an engine, or any server with the OpenAI API.",
        rich_markup_mode=None,
    )
    for command in (throughput, serve, sweep, compare):
        app.command()(finite_numbers(command))
    return app


def _workload(
    path: Path | None,
    requests: int | None,
    seed: int,
    context: int,
    prompt: tuple[float, float],
    output: tuple[float, float],
) -> Workload:
    """Of a file, or made up: lengths are (median, sigma)."""
    from jaxserve.workload.arrivals import Lengths
    from jaxserve.workload.generator import WorkloadSpec, generate
    from jaxserve.workload.reader import read_workload

    if path is not None:
        return read_workload(path, limit=requests)
    spec = WorkloadSpec(
        num_requests=requests or 100, prompt=Lengths(*prompt), output=Lengths(*output), context=context
    )
    return generate(spec, seed, name="random")


def _goal(texts: list[str] | None) -> Goal:
    from jaxserve.bench.serve.goal import parse_goal

    return parse_goal(texts or ())


def _target(url: str, model: str | None, api_key: str | None, idle_timeout: float) -> Target:
    from jaxserve.bench.serve.measure import Target
    from jaxserve.server_url import parse_server_url

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    return Target(parse_server_url(url), model, headers, idle_timeout)


def _measure(
    benchmark: str,
    target: Target,
    ready_timeout: float,
    workloads: list[Workload],
    loads: list[ServeLoad],
    goal: Goal,
    json_file: Path | None,
    plot: Path | None,
) -> list[Measured]:
    """One load after the other, each with its workload; written down before anything is printed."""
    from jaxserve.bench.arguments import announce
    from jaxserve.bench.serve import report
    from jaxserve.bench.serve.measure import find_server, measure

    _check_files(json_file, plot)
    for workload, load in zip(workloads, loads, strict=True):
        load.arrivals(workload)  # whatever is wrong with it is told before anything runs
    identity = find_server(target, timeout_s=ready_timeout)
    points = []
    for workload, load in zip(workloads, loads, strict=True):
        announce(f"{target.url}: {len(workload.requests)} requests, {load.describe()}")
        points.append(measure(target, identity.model, workload, load, goal))
    server = {"url": target.url, "model": identity.model, "version": identity.version}
    found = {"points": [point.to_json() for point in points]}
    report.write_result(json_file, report.result_of(benchmark, workloads[0], server, found))
    if plot is not None:
        report.plot(points, plot)
    return points


def _check_files(*paths: Path | None) -> None:
    from jaxserve.errors import ConfigError

    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no such folder")
