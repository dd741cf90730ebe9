"""Frozen configurations, resolved once. Nothing here imports jax, and nobody writes to a config afterwards."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal, get_args

from jaxserve.errors import ConfigError
from jaxserve.request import MAX_SPECULATIVE_TOKENS

RopeType = Literal["default", "linear", "llama3", "yarn"]
SchedulerKind = Literal["continuous", "static"]
DType = Literal["float32", "bfloat16"]
Quantization = Literal["int8"]
_HOST_MEMORY = 4 * 2**30  # where there is an accelerator
NGRAM = "ngram"
_SELF = "self:"
_EXIT = "exit:"
EXIT_ARCHITECTURE = "SelfDraftExit"  # of a store that holds an exit and no model
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields past `factor` matter only to the type named beside them.

    Sources: RoFormer (arXiv 2104.09864); linear position interpolation (arXiv 2306.15595);
    YaRN (arXiv 2309.00071); the `llama3` rule is that of the Llama 3.1 release.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None computes it from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model is, whichever file format it came from.

    `architecture` is the key into `jaxserve.models.registry`, spelled as in a Hugging Face config.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What `generation_config.json` (or the GGUF) says about ending and sampling.

    `eos_token_ids` holds every id that ends a reply. The sampling values are None where the model names none.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user may choose. None means: decided by `resolve` from the model and the platform.

    Attributes:
      dtype: of weights, activations and KV cache; "auto" is float32 on a CPU, bfloat16 elsewhere.
      quantization: "int8" keeps the layers' matrices as int8 and rounds activations to int8 token by token; None keeps
        all weights in `dtype`. On a CPU it implies `deterministic`: where activations are rounded, a difference in
        the last bit of a norm could become a whole step.
      max_model_len: longest prompt + output, in tokens.
      max_num_seqs: most sequences in one step.
      max_num_batched_tokens: most tokens computed in one step (decode tokens and prefill chunks together).
      max_prefill_chunk: most prompt tokens of one request in one step while others want to prefill as well.
      block_size: tokens a KV block holds.
      num_blocks: KV blocks usable by requests; None fills what is left of `memory_fraction`.
      memory_fraction: share of the device's memory (on a CPU, of the machine's or the container's) that everything
        together may take; None is 0.9, of which the pool gets no more than 0.1 on a CPU.
      host_memory: bytes of host memory for KV blocks of preempted requests and of the prefix cache, while others have
        their place on the device; 0 is none. None is 4 GiB on accelerators, but no more than an eighth of the host's
        memory; and none on a CPU, where the pool lies in the same memory and is the better place for it. Not with the
        static scheduler.
      enable_prefix_caching: reuse the KV blocks of equal prompt beginnings.
      scheduler: "continuous", or "static" (a batch is padded and runs until its last member ends: the baseline).
      max_waiting: most sequences that wait besides the `max_num_seqs` that run; more are refused (QueueFullError).
      max_waiting_tokens: most tokens that those that wait may have to compute together; None is no such bound. An
        empty queue takes any request.
      background_max_wait: seconds after which a waiting background request is promoted: nobody passes it any more.
      policy: "package.module:Class" of a scheduling policy (`jaxserve.scheduler.policy.Policy`); None is
        `jaxserve.scheduler.fair_policy.FairPolicy`.
      seed: root of the seeds of requests that bring none, so that a run can be repeated.
      attention_backend: "auto", or the name of a backend of `pallas_kernels.paged_attention`.
      deterministic: a request's logits and tokens have the same bits whatever else is served, however it is batched,
        chunked, cached or preempted. Only on a CPU so far.
      overlap: launch a step before the tokens of the one before have been read, so that the device need not wait for
        the host; None does so on accelerators, unless the engine speculates. Not with the static scheduler.
      speculative: who proposes draft tokens for steps to verify; None: nobody. "ngram" looks for the last few tokens
        earlier in prompt and output, and proposes what came behind them there. "self:K" drafts with the model's own
        first K layers below its own head, "exit:PATH" with the first layers below an exit that was trained for it
        (`scripts/train_draft`). Anything else is the name or path of a draft model: a smaller one of the same
        vocabulary. Not with the static scheduler.
      num_speculative_tokens: most drafts of a request in a step.
      compilation_cache_dir: where compiled programs are kept between starts; None is the user's cache folder,
        "" keeps none.
      program_cache_bytes: most bytes there, checked at every start: programs of other settings are removed, the least
        recently used first. Those in use stay.
      bucket_plan: file of a plan that `jaxserve plan-buckets` made: the shapes to compile; None plans for typical
        steps.
      record_steps: file that the size of every step is recorded in, for `jaxserve plan-buckets`.
      record: file that every input and decision is recorded in, prompts included, for `jaxserve replay`.
      record_costs: file that what steps cost is written to when the engine is closed, for `jaxserve simulate`.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Quantization | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    block_size: int = 32
    num_blocks: int | None = None
    memory_fraction: float | None = None
    host_memory: int | None = None
    enable_prefix_caching: bool = True
    scheduler: SchedulerKind = "continuous"
    max_waiting: int = 4096
    max_waiting_tokens: int | None = None
    background_max_wait: float = 30.0
    policy: str | None = None
    seed: int = 0
    attention_backend: str = "auto"
    deterministic: bool = False
    overlap: bool | None = None
    speculative: str | None = None
    num_speculative_tokens: int = 8
    compilation_cache_dir: str | None = None
    program_cache_bytes: int = 2 * 2**30
    bucket_plan: str | None = None
    record_steps: str | None = None
    record: str | None = None
    record_costs: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """An `EngineConfig` in which every choice has been made; see there for the meaning of each field."""

    dtype: DType
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    block_size: int
    enable_prefix_caching: bool
    scheduler: SchedulerKind
    max_waiting: int
    seed: int
    attention_backend: str
    deterministic: bool = False
    overlap: bool = False
    quantization: Quantization | None = None
    max_waiting_tokens: int | None = None
    background_max_wait: float = 30.0
    policy: str | None = None
    host_memory: int = 0
    speculative: str | None = None
    num_speculative_tokens: int = 0

    @property
    def max_rows(self) -> int:
        """Most rows of logits in a step: one a sequence, and one a draft."""
        return max(self.max_num_seqs, 1 + self.num_speculative_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table."""
        return -(-self.max_model_len // self.block_size)


def resolve(options: EngineConfig, model: ModelConfig, *, platform: str) -> ResolvedConfig:
    """Decide everything that `options` leaves open.

    Args:
      platform: "cpu", "cuda", ... (`jax.default_backend()`, passed in so that this module needs no jax).

    Raises:
      ConfigError: an option is out of range, or two contradict each other.
    """
    on_cpu = platform == "cpu"
    max_model_len = options.max_model_len or model.max_position_embeddings
    max_num_seqs = options.max_num_seqs or (64 if on_cpu else 256)
    max_tokens = options.max_num_batched_tokens or max(max_num_seqs, 256 if on_cpu else 2048)
    chunk = options.max_prefill_chunk or max(1, max_tokens // 2)
    dtype = options.dtype if options.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_tokens),
        ("max_prefill_chunk", chunk),
        ("block_size", options.block_size),
        ("max_waiting", options.max_waiting),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if options.max_waiting_tokens is not None and options.max_waiting_tokens < 1:
        raise ConfigError(f"max_waiting_tokens must be at least 1, got {options.max_waiting_tokens}")
    if not options.background_max_wait >= 0:
        raise ConfigError(
            f"background_max_wait must be at least 0 seconds, got {options.background_max_wait}"
        )
    if options.policy is not None and options.scheduler == "static":
        raise ConfigError("the static scheduler, a baseline, takes requests as they come: it has no policy")
    if options.quantization is not None and options.quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, or None; got {options.quantization!r}"
        )
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's context of {model.max_position_embeddings} tokens"
        )
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
            "so that every running sequence can decode in each step"
        )
    return ResolvedConfig(
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_prefill_chunk=min(chunk, max_tokens),
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        scheduler=options.scheduler,
        max_waiting=options.max_waiting,
        seed=options.seed,
        attention_backend=options.attention_backend,
        deterministic=options.deterministic or (options.quantization is not None and on_cpu),
        overlap=_resolve_overlap(options, on_cpu),
        quantization=options.quantization,
        max_waiting_tokens=options.max_waiting_tokens,
        background_max_wait=options.background_max_wait,
        policy=options.policy,
        host_memory=_resolve_host_memory(options, on_cpu),
        speculative=options.speculative,
        num_speculative_tokens=_resolve_speculation(options, model, max_tokens),
    )


def self_draft_layers(speculative: str) -> int | None:
    """K of "self:K"; None for anything else.

    Raises:
      ConfigError: K is no number.
    """
    if not speculative.startswith(_SELF):
        return None
    number = speculative.removeprefix(_SELF)
    if not re.fullmatch("[0-9]{1,9}", number):  # int() takes other digits as well, and not any number of them
        raise ConfigError(f"speculative: expected self:K with a number of layers K, got {speculative!r}")
    return int(number)


def exit_path(speculative: str) -> str | None:
    """PATH of "exit:PATH"; None for anything else.

    Raises:
      ConfigError: there is no PATH.
    """
    if not speculative.startswith(_EXIT):
        return None
    path = speculative.removeprefix(_EXIT)
    if not path:
        raise ConfigError("speculative: expected exit:PATH with the folder of a trained exit")
    return path


def _resolve_speculation(options: EngineConfig, model: ModelConfig, max_tokens: int) -> int:
    """Most drafts of a request in a step."""
    if options.speculative is None:
        return 0
    layers = self_draft_layers(options.speculative)
    if layers is not None and not 1 <= layers <= model.num_layers:
        raise ConfigError(
            f"speculative: self:K drafts with 1 to {model.num_layers} layers of this model, got {layers}"
        )
    if options.scheduler == "static":
        raise ConfigError("the static scheduler, a baseline, verifies no drafts")
    most = min(MAX_SPECULATIVE_TOKENS, max_tokens - 1)
    if not 1 <= options.num_speculative_tokens <= most:
        raise ConfigError(
            f"num_speculative_tokens must be between 1 and {most}, got {options.num_speculative_tokens}"
        )
    return options.num_speculative_tokens


def _resolve_host_memory(options: EngineConfig, on_cpu: bool) -> int:
    size = options.host_memory
    if size is not None and size < 0:
        raise ConfigError(f"host_memory must be at least 0, got {size}")
    if options.scheduler == "static":
        if size:
            raise ConfigError("the static scheduler, a baseline, keeps nothing in host memory")
        return 0
    return (0 if on_cpu else _HOST_MEMORY) if size is None else size


def _resolve_overlap(options: EngineConfig, on_cpu: bool) -> bool:
    if options.scheduler == "static":
        if options.overlap:
            raise ConfigError("the static scheduler, a baseline, takes one step after the other: no overlap")
        return False
    if options.overlap is None:
        # Who speculates awaits a step's result before the next: those whose first tokens came in steps one apart would
        # go on in steps of their own, half as full and twice as many.
        return not on_cpu and options.speculative is None
    return options.overlap


def replace(config: EngineConfig, **changes: object) -> EngineConfig:
    """A copy of `config` with `changes`; unknown names raise TypeError."""
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
