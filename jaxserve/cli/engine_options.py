"""The engine's options on the command line, for every command that starts an engine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.config import EngineConfig
from jaxserve.config import Quantization as QuantizationName

PANEL = "Engine"


class DTypeChoice(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class QuantizationChoice(StrEnum):
    none = "none"
    int8 = "int8"


class PoolingChoice(StrEnum):
    mean = "mean"
    last = "last"


class SchedulerChoice(StrEnum):
    continuous = "continuous"
    static = "static"


Model = Annotated[
    str,
    typer.Option(
        help="What to run: a name from `jaxserve pull --list` (fetched on first use), a Hugging Face directory, "
        "a .gguf file, or a checkpoint that `jaxserve convert` wrote."
    ),
]
DType = Annotated[
    DTypeChoice,
    typer.Option(
        help="Type of weights and KV cache; auto is float32 on a CPU, bfloat16 elsewhere.",
        rich_help_panel=PANEL,
    ),
]
Quantization = Annotated[
    QuantizationChoice,
    typer.Option(
        help="int8 makes the layers' matrices int8 when they are loaded, and rounds activations token by token.",
        rich_help_panel=PANEL,
    ),
]
Pooling = Annotated[
    PoolingChoice,
    typer.Option(
        help="What /v1/embeddings are made of: the mean of a text's tokens, or its last token.",
        rich_help_panel=PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest prompt and output together, in tokens [default: the model's].",
        rich_help_panel=PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Most sequences computed in one step.", rich_help_panel=PANEL)
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Most tokens computed in one step, all sequences together.", rich_help_panel=PANEL
    ),
]
MaxPrefillChunk = Annotated[
    int | None,
    typer.Option(min=1, help="Most prompt tokens of one request in one step.", rich_help_panel=PANEL),
]
BlockSize = Annotated[
    int, typer.Option(min=1, help="Tokens in a block of the KV cache.", rich_help_panel=PANEL)
]
NumBlocks = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Blocks of the KV cache; auto fills what is left of the memory fraction.",
        rich_help_panel=PANEL,
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Share of the device's memory (CPU: of the machine's or the container's) for everything together "
        "[default: 0.9; on a CPU the KV cache then takes at most 0.1].",
        rich_help_panel=PANEL,
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="BYTES",
        help="Host memory for blocks of the KV cache whose place on the device others have; 0 is none [default: 4 GiB, "
        "at most an eighth of the host's memory; on a CPU none].",
        rich_help_panel=PANEL,
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Compute equal beginnings of prompts once.",
        rich_help_panel=PANEL,
    ),
]
Scheduler = Annotated[
    SchedulerChoice,
    typer.Option(
        help="continuous, or static (a batch runs until its last member ends: the baseline to compare with).",
        rich_help_panel=PANEL,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.MODULE:CLASS",
        help="Scheduling policy to use instead of the built-in one, from where Python finds modules.",
        rich_help_panel=PANEL,
    ),
]
MaxWaitingTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of prompts that may wait; more get 429 [default: no bound but --max-waiting].",
        rich_help_panel=PANEL,
    ),
]
BackgroundMaxWait = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Seconds after which interactive requests no longer pass a waiting background request.",
        rich_help_panel=PANEL,
    ),
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        help="auto, cpu-native, xla, pallas-mosaic-gpu or pallas-triton; pallas-interpret runs a GPU kernel's code "
        "slowly on a CPU.",
        rich_help_panel=PANEL,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="A request's answer has the same bits whatever else is served (on a CPU only).",
        rich_help_panel=PANEL,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Launch a step before the one before has been read [default: on accelerators, without --speculative].",
        rich_help_panel=PANEL,
    ),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|self:K|exit:PATH|MODEL",
        help="Who proposes draft tokens, which steps verify as many at a time as pay [default: nobody]. ngram: what "
        "came behind the last few tokens earlier in prompt or output. self:K: the model's own first K layers. "
        "exit:PATH: these below an exit that scripts/train_draft made. Or name a smaller model of the same vocabulary.",
        rich_help_panel=PANEL,
    ),
]
NumSpeculativeTokens = Annotated[
    int, typer.Option(min=1, help="Most draft tokens of a sequence in a step.", rich_help_panel=PANEL)
]
Seed = Annotated[
    int, typer.Option(help="Root of the seeds of requests that bring none.", rich_help_panel=PANEL)
]

BucketPlan = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.json",
        help="Compile the shapes of a plan that `jaxserve plan-buckets` made [default: shapes for typical steps].",
        rich_help_panel=PANEL,
    ),
]
RecordSteps = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Record the size of every step (tokens and sequences, nothing else), for `jaxserve plan-buckets`.",
        rich_help_panel=PANEL,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Record every request (its prompt included) and every decision, for `jaxserve replay`.",
        rich_help_panel=PANEL,
    ),
]
RecordCosts = Annotated[
    Path | None,
    typer.Option(
        metavar="COSTS.json",
        help="Write what steps cost there when the server ends, for `jaxserve simulate`.",
        rich_help_panel=PANEL,
    ),
]
ProgramCacheBytes = Annotated[
    int,
    typer.Option(
        min=0,
        help="Most bytes of compiled programs on disk; at every start, those of other settings are removed beyond it, "
        "the least recently used first.",
        rich_help_panel=PANEL,
    ),
]


def quantization_of(choice: QuantizationChoice) -> QuantizationName | None:
    return None if choice is QuantizationChoice.none else "int8"


def num_blocks_of(text: str) -> int | None:
    """None for "auto"; raises BadParameter for what is neither that nor a number of at least 1."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"--num-blocks must be auto or a number of at least 1, got {text!r}")
    return int(text)


def engine_config(
    *,
    dtype: DTypeChoice,
    quantization: QuantizationChoice,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_prefill_chunk: int | None,
    block_size: int,
    num_blocks: str,
    memory_fraction: float | None,
    host_memory: int | None,
    enable_prefix_caching: bool,
    scheduler: SchedulerChoice,
    attention_backend: str,
    deterministic: bool,
    overlap: bool | None,
    speculative: str | None,
    num_speculative_tokens: int,
    seed: int,
    bucket_plan: Path | None,
    record_steps: Path | None,
    program_cache_bytes: int,
    record: Path | None = None,
    record_costs: Path | None = None,
    max_waiting: int = 4096,
    max_waiting_tokens: int | None = None,
    background_max_wait: float = 30.0,
    policy: str | None = None,
) -> EngineConfig:
    """The configuration that the flags ask for."""
    return EngineConfig(
        dtype=dtype.value,
        quantization=quantization_of(quantization),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        block_size=block_size,
        num_blocks=num_blocks_of(num_blocks),
        memory_fraction=memory_fraction,
        host_memory=host_memory,
        enable_prefix_caching=enable_prefix_caching,
        scheduler=scheduler.value,
        attention_backend=attention_backend,
        deterministic=deterministic,
        overlap=overlap,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        seed=seed,
        bucket_plan=None if bucket_plan is None else str(bucket_plan),
        record_steps=None if record_steps is None else str(record_steps),
        record=None if record is None else str(record),
        record_costs=None if record_costs is None else str(record_costs),
        program_cache_bytes=program_cache_bytes,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        background_max_wait=background_max_wait,
        policy=policy,
    )
