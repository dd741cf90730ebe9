"""`jaxserve serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli import engine_options as options
from jaxserve.cli.log import LogFormat, show_log, start_progress

PANEL = "Server"


class ToolCallParserChoice(StrEnum):
    """Names of `jaxserve.tool_calls.formats`."""

    auto = "auto"
    none = "none"
    hermes = "hermes"
    llama3_json = "llama3_json"
    mistral = "mistral"
    smollm2 = "smollm2"


def serve(
    model: options.Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.", rich_help_panel=PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=PANEL)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests use; may be given several times [default: the model's].",
            rich_help_panel=PANEL,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JAXSERVE_API_KEY",
            show_envvar=True,
            help="Key that clients must send (`Authorization: Bearer KEY`); the variable keeps it out of the process "
            "list. /health, /ready, /metrics, /version, /openapi.json and the page stay open.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of keys, a line `NAME: KEY` each; names appear in /metrics and share the engine fairly.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Web origin whose pages may call the server from a browser; may be given several times "
            "[default: *, any].",
            rich_help_panel=PANEL,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Speak TLS, with this certificate (PEM, and its chain).", rich_help_panel=PANEL),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            help="The certificate's private key (PEM) [default: it is in the certificate's file].",
            rich_help_panel=PANEL,
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page",
            help="A page at / to chat and to watch the engine; it needs no key itself, and asks for one.",
            rich_help_panel=PANEL,
        ),
    ] = True,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for /v1/files and /v1/batches, which are not there without it. A restart goes on with "
            "batches that it finds there.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            help="How lines of the log look, of which there is one for every request (on stderr).",
            rich_help_panel=PANEL,
        ),
    ] = LogFormat.text,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send an OpenTelemetry span for every request to this URL (OTLP over HTTP), usually "
            "http://HOST:4318/v1/traces; needs the extra `otel`.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Folder for traces of jax.profiler, which POST /debug/profile records; not there without it.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Sequences that may wait; more get 429.", rich_help_panel=PANEL)
    ] = 4096,
    max_waiting_tokens: options.MaxWaitingTokens = None,
    background_max_wait: options.BackgroundMaxWait = 30.0,
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Time to the first token that interactive requests want which name none; one that can't have it is "
            "refused [default: any].",
            rich_help_panel=PANEL,
        ),
    ] = None,
    slo_itl_ms: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Time between tokens that interactive requests want which name none: prompts of others are computed "
            "in pieces small enough for it. 0 is any.",
            rich_help_panel=PANEL,
        ),
    ] = 500.0,
    tool_call_parser: Annotated[
        ToolCallParserChoice,
        typer.Option(
            help="The form in which the model writes tool calls; auto goes by its chat template, none refuses tools.",
            rich_help_panel=PANEL,
        ),
    ] = ToolCallParserChoice.auto,
    pooling: options.Pooling = options.PoolingChoice.mean,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds that running requests get to end after SIGTERM or Ctrl-C.",
            rich_help_panel=PANEL,
        ),
    ] = 30.0,
    wait_for_programs: Annotated[
        bool,
        typer.Option(
            "--wait-for-programs",
            help="Take requests only when every shape is compiled; without it a first start serves early, and its "
            "first answers are slower.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    dtype: options.DType = options.DTypeChoice.auto,
    quantization: options.Quantization = options.QuantizationChoice.none,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_prefill_chunk: options.MaxPrefillChunk = None,
    block_size: options.BlockSize = 32,
    num_blocks: options.NumBlocks = "auto",
    memory_fraction: options.MemoryFraction = None,
    host_memory: options.HostMemory = None,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    scheduler: options.Scheduler = options.SchedulerChoice.continuous,
    policy: options.Policy = None,
    attention_backend: options.AttentionBackend = "auto",
    deterministic: options.Deterministic = False,
    overlap: options.Overlap = None,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.NumSpeculativeTokens = 8,
    seed: options.Seed = 0,
    bucket_plan: options.BucketPlan = None,
    record_steps: options.RecordSteps = None,
    record: options.Record = None,
    record_costs: options.RecordCosts = None,
    program_cache_bytes: options.ProgramCacheBytes = 2 * 2**30,
) -> int:
    """Serve a model over HTTP, with the OpenAI API.

    Takes POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages (streamed or not),
    /v1/embeddings, /v1/messages/count_tokens, /tokenize and /detokenize, with --data-dir /v1/files and /v1/batches,
    /debug/profile with --profile, GET /v1/models, /health, /ready, /metrics, /version, /openapi.json and
    /debug/engine/stream; a page is at /. Prints one line, "listening on URL", as soon as requests are taken. SIGTERM
    and Ctrl-C let running answers end; a second one does not. Exit codes: 0 after a signal, 1 when the engine failed, 2
    for bad input.

    \b
    Examples:
      jaxserve serve --model smollm2
      jaxserve serve --model ./TinyLlama-1.1B-Chat --port 9000 --api-key secret
      curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    # Imported here so that `jaxserve --help` needs neither aiohttp nor jax.
    from jaxserve.batch_jobs.api import BatchApi
    from jaxserve.device.profiler import JaxProfiler
    from jaxserve.engine_factory import create_engine
    from jaxserve.request import ServiceTargets
    from jaxserve.server.api_keys import DEFAULT_KEY_NAME, make_api_keys, read_key_file
    from jaxserve.server.app import ServerOptions
    from jaxserve.server.cors import ANY_ORIGIN, check_origin
    from jaxserve.server.extension import Extension
    from jaxserve.server.live_feed import LiveFeed
    from jaxserve.server.page_files import Page
    from jaxserve.server.profiling import ProfileApi
    from jaxserve.server.run import RunOptions, bind, run_server
    from jaxserve.server.tls import tls_context
    from jaxserve.server.tracing import Tracing

    if api_key == "":
        raise typer.BadParameter("--api-key must not be empty")
    if ssl_keyfile is not None and ssl_certfile is None:
        raise typer.BadParameter("--ssl-keyfile needs --ssl-certfile")
    if profile is not None and str(profile) == ".":
        raise typer.BadParameter("--profile must name a folder of its own")
    if data_dir is not None and str(data_dir) == ".":
        raise typer.BadParameter("--data-dir must name a folder of its own")
    show_log(log_format)
    keys = make_api_keys(
        [
            *([(DEFAULT_KEY_NAME, api_key)] if api_key is not None else []),
            *(read_key_file(api_key_file) if api_key_file is not None else []),
        ]
    )
    origins = tuple(check_origin(origin) for origin in allowed_origins or (ANY_ORIGIN,))
    tls = None if ssl_certfile is None else tls_context(ssl_certfile, ssl_keyfile)
    config = options.engine_config(
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=memory_fraction,
        host_memory=host_memory,
        enable_prefix_caching=enable_prefix_caching,
        scheduler=scheduler,
        attention_backend=attention_backend,
        deterministic=deterministic,
        overlap=overlap,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        seed=seed,
        bucket_plan=bucket_plan,
        record_steps=record_steps,
        record=record,
        record_costs=record_costs,
        program_cache_bytes=program_cache_bytes,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        background_max_wait=background_max_wait,
        policy=policy,
    )
    names = tuple(served_model_name or ())
    sock = bind(host, port)
    extensions: list[Extension] = [LiveFeed()]
    if page:
        extensions.append(Page())
    if otlp_traces_endpoint is not None:
        extensions.append(Tracing(otlp_traces_endpoint))
    if profile is not None:
        extensions.append(ProfileApi(profile, JaxProfiler()))
    if data_dir is not None:
        extensions.append(BatchApi(data_dir))
    with sock:
        with start_progress(log_format) as progress:
            engine = create_engine(
                model,
                config,
                served_name=names[0] if names else None,
                progress=progress,
                wait_for_programs=wait_for_programs,
            )
        return run_server(
            engine,
            sock,
            RunOptions(
                server=ServerOptions(
                    keys=keys,
                    allowed_origins=origins,
                    max_open_requests=max_waiting + engine.config.max_num_seqs,
                ),
                model_names=names,
                drain_seconds=drain_seconds,
                pooling=pooling.value,
                tls=tls,
                tool_call_parser=tool_call_parser.value,
                extensions=tuple(extensions),
                targets=ServiceTargets(
                    ttft_seconds=slo_ttft_ms / 1000 if slo_ttft_ms else None,
                    itl_seconds=slo_itl_ms / 1000 if slo_itl_ms else None,
                ),
            ),
            announce=lambda line: print(line, flush=True),
        )
