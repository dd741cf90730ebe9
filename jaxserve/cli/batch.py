"""`jaxserve batch`: answers a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli import engine_options as options
from jaxserve.cli.log import show_log

EXIT_SOME_FAILED = 1


def batch(
    input_file: Annotated[
        Path,
        typer.Argument(metavar="INPUT.jsonl", help="Requests, one JSON object a line.", show_default=False),
    ],
    output_file: Annotated[
        Path, typer.Argument(metavar="OUTPUT.jsonl", help="Answers, in the same order.", show_default=False)
    ],
    model: options.Model,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that the requests use; may be given several times [default: the model's]."),
    ] = None,
    dtype: options.DType = options.DTypeChoice.auto,
    quantization: options.Quantization = options.QuantizationChoice.none,
    pooling: options.Pooling = options.PoolingChoice.mean,
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
    attention_backend: options.AttentionBackend = "auto",
    deterministic: options.Deterministic = False,
    overlap: options.Overlap = None,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.NumSpeculativeTokens = 8,
    seed: options.Seed = 0,
    bucket_plan: options.BucketPlan = None,
    record_steps: options.RecordSteps = None,
    program_cache_bytes: options.ProgramCacheBytes = 2 * 2**30,
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    A line is {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; the other urls are
    /v1/completions and /v1/embeddings, and the body is what the server takes. Every line that is not blank gets one
    answer, in order; a bad line gets an error record with its line number and stops nothing.

    An interrupted run leaves OUTPUT.jsonl.partial beside the output: the same command goes on from there. The
    output appears at the end, whole. Exit codes: 0 all lines answered, 1 some failed, 2 bad usage.

    \b
    Example:
      jaxserve batch questions.jsonl answers.jsonl --model smollm2
    """
    if not input_file.is_file():
        raise typer.BadParameter(f"{input_file}: there is no such file")
    if output_file.is_dir() or not output_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{output_file}: can't be written there")
    if output_file.exists() and output_file.samefile(input_file):
        raise typer.BadParameter(f"{output_file}: is the input as well")
    # Imported here so that `jaxserve --help` needs no jax.
    from jaxserve.batch_runner import run_batch
    from jaxserve.engine_factory import create_engine
    from jaxserve.progress import BarProgress
    from jaxserve.server.conversion import ServingContext
    from jaxserve.server.tool_use import tool_format_of

    show_log()
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
        program_cache_bytes=program_cache_bytes,
    )
    names = tuple(served_model_name or ())
    with BarProgress() as progress:
        engine = create_engine(
            model,
            config,
            served_name=names[0] if names else None,
            progress=progress,
            wait_for_programs=False,
        )
        try:
            context = ServingContext(
                tokenizer=engine.tokenizer,
                generation=engine.generation,
                model_names=names or (engine.model_name,),
                max_model_len=engine.max_request_tokens,
                validator=engine,
                tool_format=tool_format_of(engine.tokenizer),
                pooling=pooling.value,
                embedding_size=engine.model_config.hidden_size,
            )
            summary = run_batch(
                engine,
                context,
                input_file,
                output_file,
                max_in_flight=2 * engine.config.max_num_seqs,
                progress=progress,
            )
        finally:
            engine.close()
    print(summary.text())
    return EXIT_SOME_FAILED if summary.failed else 0
