"""`jaxserve compile`: an engine's programs, compiled before it starts."""

from __future__ import annotations

import dataclasses
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli import engine_options as options
from jaxserve.cli.log import show_log


class TargetChoice(StrEnum):
    h200 = "h200"
    a100 = "a100"


def compile_command(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As for serve.", show_default=False)
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Say which programs are kept, how large, when used and for what.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove all kept programs that nobody uses now.")
    ] = False,
    target: Annotated[
        TargetChoice | None,
        typer.Option(help="Compile for this GPU, which need not be here [default: the device that is]."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to put the programs in [default: where engines on this machine look for them].",
        ),
    ] = None,
    dtype: options.DType = options.DTypeChoice.auto,
    quantization: options.Quantization = options.QuantizationChoice.none,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    block_size: options.BlockSize = 32,
    num_blocks: options.NumBlocks = "auto",
    memory_fraction: options.MemoryFraction = None,
    host_memory: options.HostMemory = None,
    attention_backend: options.AttentionBackend = "auto",
    deterministic: options.Deterministic = False,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.NumSpeculativeTokens = 8,
    bucket_plan: options.BucketPlan = None,
    program_cache_bytes: options.ProgramCacheBytes = 2 * 2**30,
) -> None:
    """Compile everything that `serve` or `batch` with the same flags will run, and keep it.

    Weights are not read. A start that finds its programs compiles nothing; one with other flags, versions or another
    device compiles its own, and says what differs.

    With --target, copy what DIR holds into the GPU machine's ~/.cache/jaxserve/executables, owned by the user that
    serves and writable by nobody else. Both sides need the same versions of this package, JAX and its plugin, the
    same XLA_FLAGS, and the same number of KV blocks. Compiled without the GPU, matrix products are not tuned on it.

    \b
    Examples:
      jaxserve compile smollm2
      jaxserve compile ./Llama-3.1-8B --target h200 --num-blocks 20000 --output programs
      jaxserve compile --list
    """
    if list_ or clean:
        if model is not None or target is not None or (list_ and clean):
            raise typer.BadParameter("--list and --clean stand alone, or with --output")
        return _list_or_clean(output, clean=clean)
    if model is None:
        raise typer.BadParameter("a MODEL is needed, or --list, or --clean")
    if target is not None:
        if output is None:
            raise typer.BadParameter("--target needs --output: the programs are for another machine")
        # JAX must not look for the GPU here.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Imported here so that `jaxserve --help` needs no jax.
    from jaxserve.compile_programs import compile_programs
    from jaxserve.device.program_eviction import mebibytes
    from jaxserve.device.targets import TARGETS
    from jaxserve.progress import BarProgress

    show_log()
    config = options.engine_config(
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=None,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=memory_fraction,
        host_memory=host_memory,
        enable_prefix_caching=True,
        scheduler=options.SchedulerChoice.continuous,
        attention_backend=attention_backend,
        deterministic=deterministic,
        overlap=None,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        seed=0,
        bucket_plan=bucket_plan,
        record_steps=None,
        program_cache_bytes=program_cache_bytes,
    )
    if output is not None:
        config = dataclasses.replace(config, compilation_cache_dir=str(output))
    with BarProgress() as progress:
        done = compile_programs(
            model, config, target=None if target is None else TARGETS[target.value], progress=progress
        )
    print(
        f"{done.num_programs} programs, {done.num_compiled} of them compiled now, {mebibytes(done.num_bytes)}: "
        f"{done.folder}"
    )


def _list_or_clean(output: Path | None, *, clean: bool) -> None:
    """What lies in `output`, or where engines look for programs."""
    from jaxserve.compile_programs import programs_folder
    from jaxserve.config import EngineConfig
    from jaxserve.device.program_eviction import evict_programs, kept_programs
    from jaxserve.device.program_listing import list_programs, size_of

    root = output or programs_folder(EngineConfig())
    if not clean:
        for line in list_programs(root):
            print(line)
        return
    before = kept_programs(root)
    evict_programs(root, 0)
    left = kept_programs(root)
    gone = [each for each in before if each not in left]
    print(f"removed {len(gone)} of {len(before)} sets of programs, {size_of(gone)}: {root}")
