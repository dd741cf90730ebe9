"""One model on the device, and as many engines around it as tests like; runs of requests, and how to compare them.

What an engine limits on the host (pool size, chunks, slots, cache, scheduler) needs no compilation, so every test has
engines of its own over the same compiled programs. They also share the arrays: an engine starts on whatever the one
before has left in the KV cache, which must not matter. So use one engine after the other: what an older one takes for
cached is gone. Only solo runs have blocks of their own and may come in between.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.batch.buckets import ShapeBuckets, default_buckets
from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig, GenerationDefaults, ModelConfig, ResolvedConfig, resolve
from jaxserve.device import kv_cache
from jaxserve.device.attention import choose_attention
from jaxserve.device.draft_model import DraftModel
from jaxserve.device.model_runner import LaunchedStep, ModelRunner
from jaxserve.engine import EngineCore
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.models.random_weights import init_random
from jaxserve.outputs import RequestOutput, TokenLogprobs
from jaxserve.progress import NullProgress
from jaxserve.request import FinishReason, GenerationRequest, SamplingParams
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.speculative.device_proposer import DeviceProposer
from jaxserve.speculative.proposer import Proposer
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.tokenizer import Tokenizer

NEAR_TIE = 1e-4  # between the two best logits: rounding alone may swap them
LOGPROB_TOLERANCE = 1e-4
SOLO_SEQUENCES = 4

# Untied, because a tied random model repeats its last token whatever the context holds. This one's next token
# depends on every token before, so one wrong cache entry changes an output soon.
TINY_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
)
TINY_OPTIONS = EngineConfig(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=16,
    max_num_batched_tokens=32,
    block_size=8,
    host_memory=2**20,
)
DEMO_OPTIONS = EngineConfig(
    dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=32, block_size=16
)
VOCAB = TINY_MODEL.vocab_size
COLOURED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["red", "green"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WORDS = r"(ab|cde){4,6}\.[x-z]{2}"
CHOICES = ("a red apple", "a green pear", "nothing at all")


class _ShiftedRunner:
    """The same runner, with blocks behind everybody else's: solo runs overwrite nothing that an engine has cached."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.padding_row = model.runner.padding_row
        self.num_compiled = model.runner.num_compiled
        self.failure = None
        self.is_done, self.read = model.runner.is_done, model.runner.read
        self._builder = BatchBuilder(
            model.buckets, block_size=model.config.block_size, padding_row=self.padding_row
        )

    @property
    def serving_compilations(self) -> int:
        return self._model.runner.serving_compilations

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> LaunchedStep:
        model, by = self._model, self._model.num_blocks
        shifted = dataclasses.replace(
            plan,
            scheduled=tuple(
                msgspec.structs.replace(
                    item, new_block_ids=tuple(block_id + by for block_id in item.new_block_ids)
                )
                for item in plan.scheduled
            ),
            block_copies=tuple((source + by, destination + by) for source, destination in plan.block_copies),
        )
        return model.runner.launch(
            shifted, dataclasses.replace(self._builder.build(shifted), masks=batch.masks)
        )

    def rebuild_state(self) -> None:
        raise AssertionError("a solo run failed at a step")

    def close(self) -> None: ...


@dataclass
class ServedModel:
    """A warmed-up runner and all that an engine needs beside it.

    Attributes:
      num_blocks: of the pool for engines; `SOLO_SEQUENCES` more sequences fit behind it.
      host: room for blocks in host memory; engines use none of it unless they are told to.
    """

    config: ResolvedConfig
    model_config: ModelConfig
    generation: GenerationDefaults
    tokenizer: Tokenizer
    params: dict[Any, Any]
    runner: ModelRunner
    buckets: ShapeBuckets
    num_blocks: int
    host: HostSpace
    grammars: GrammarCompiler = field(init=False)
    _solos: dict[str, dict[int, Outcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(
            self.tokenizer, self.model_config.vocab_size, self.generation.eos_token_ids
        )

    def engine(
        self,
        *,
        num_blocks: int | None = None,
        num_host_blocks: int = 0,
        runner: Any = None,
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
        drafts: bool = False,
        grammars: GrammarCompiler | None = None,
        **changes: Any,
    ) -> EngineCore:
        """A new engine; `changes` are fields of the configuration that only the host knows, none beyond the model's.

        Args:
          drafts: the runner's draft proposes.
        """
        config = dataclasses.replace(self.config, **changes)
        num_blocks = num_blocks or self.num_blocks
        runner, builder = runner or self.runner, None
        if drafts:
            builder = BatchBuilder(
                self.buckets, block_size=config.block_size, padding_row=self.runner.padding_row
            )
            proposer = DeviceProposer(runner, builder)
        assert config.max_rows <= self.config.max_rows
        assert config.max_num_seqs <= self.config.max_num_seqs
        assert config.max_num_batched_tokens <= self.config.max_num_batched_tokens
        assert config.max_model_len <= self.config.max_model_len
        assert config.block_size == self.config.block_size
        assert num_blocks <= self.num_blocks
        assert num_host_blocks <= self.host.num_blocks
        return EngineCore(
            model_name="tiny",
            config=config,
            model_config=self.model_config,
            generation=self.generation,
            tokenizer=self.tokenizer,
            runner=runner,
            builder=builder,
            buckets=self.buckets,
            num_blocks=num_blocks,
            host=HostSpace(num_host_blocks, self.host.block_bytes),
            clock=clock,
            proposer=proposer,
            grammars=grammars or self.grammars,
        )

    def solo(self, request: GenerationRequest) -> dict[int, Outcome]:
        """The choices of a request that has an engine to itself, with the two best logprobs at each token."""
        params = dataclasses.replace(request.params, logprobs=max(2, request.params.logprobs or 0))
        key = repr((request.prompt_token_ids, params))
        if key not in self._solos:
            assert params.is_greedy or params.seed is not None, "an unseeded request can't be repeated"
            engine = self.engine(
                num_blocks=SOLO_SEQUENCES * self.config.max_blocks_per_seq,
                runner=_ShiftedRunner(self),
                enable_prefix_caching=False,
                max_prefill_chunk=self.config.max_num_batched_tokens,
            )
            alone = dataclasses.replace(request, params=params, stream=False)
            self._solos[key] = {index: out for (_, index), out in run(engine, [alone]).items()}
        return self._solos[key]

    def close(self) -> None:
        self.runner.close()


def serve(
    options: EngineConfig,
    model: ModelConfig,
    params: dict[Any, Any],
    tokenizer: Tokenizer,
    cache_directory: Path | None = None,
    *,
    buckets: ShapeBuckets | None = None,
    observe_logits: Callable[[HostBatch, np.ndarray], None] | None = None,
    draft: DraftModel | None = None,
    draft_params: dict[Any, Any] | None = None,
) -> ServedModel:
    """Compile everything. The pool holds every sequence at full length."""
    config = resolve(options, model, platform="cpu")
    buckets = buckets or default_buckets(config)
    num_blocks = config.max_num_seqs * config.max_blocks_per_seq
    block_bytes = kv_cache.block_bytes(
        model, config.block_size, jnp.dtype(config.dtype), draft.cached if draft else None
    )
    host = HostSpace(config.host_memory // block_bytes, block_bytes)
    runner = ModelRunner(
        model,
        config,
        jax.tree.map(lambda leaf: leaf, params),  # the runner empties its own
        attention=choose_attention(model, config),
        num_blocks=num_blocks + SOLO_SEQUENCES * config.max_blocks_per_seq,
        buckets=buckets,
        host=host,
        cache_directory=cache_directory,
        observe_logits=observe_logits,
        draft=draft,
        draft_params=draft_params,
    )
    runner.warm_up(NullProgress())
    generation = GenerationDefaults(eos_token_ids=(2,))
    return ServedModel(config, model, generation, tokenizer, params, runner, buckets, num_blocks, host)


def serve_tiny(tokenizer: Tokenizer, cache_directory: Path | None = None) -> ServedModel:
    """Two layers of random weights with the demo model's vocabulary."""
    params = init_random(TINY_MODEL, jnp.float32)
    for layer in params["layers"].values():
        # Attention outweighs the token itself, so that every position of the context matters.
        layer["self_attn"]["o_proj"]["kernel"] *= 3
    return serve(TINY_OPTIONS, TINY_MODEL, params, tokenizer, cache_directory)


def serve_demo(checkpoint_dir: Path, cache_directory: Path | None = None) -> ServedModel:
    """SmolLM2-135M-Instruct itself."""
    checkpoint = open_checkpoint(checkpoint_dir)
    params = checkpoint.load_params(jnp.float32)
    return serve(DEMO_OPTIONS, checkpoint.config, params, checkpoint.load_tokenizer(), cache_directory)


def prompt_ids(name: str, length: int) -> tuple[int, ...]:
    """Token ids made up from a name; no special ones."""
    rng = random.Random(name)
    return tuple(rng.randrange(100, VOCAB) for _ in range(length))


def ask(
    name: str,
    prompt: int | Sequence[int],
    max_tokens: int = 12,
    *,
    priority: int = 0,
    stream: bool = True,
    **params: Any,
) -> GenerationRequest:
    """A greedy request unless told otherwise, whose end is its `max_tokens` unless told otherwise."""
    ids = prompt_ids(name, prompt) if isinstance(prompt, int) else tuple(prompt)
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
    return GenerationRequest(
        name, ids, SamplingParams(max_tokens=max_tokens, **fields), priority=priority, stream=stream
    )


@dataclass
class Outcome:
    """All outputs of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_outputs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    embedding: np.ndarray | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id} goes on after its end: {output}"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error, self.num_cached_tokens = output.error, output.num_cached_tokens
        self.num_outputs += 1
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_tokens = output.num_accepted_tokens
        self.embedding = output.embedding
        assert output.num_output_tokens == len(self.token_ids), (
            f"{output.request_id}: usage and tokens differ"
        )
        assert output.logprobs is None or len(self.logprobs) == len(self.token_ids)


Outcomes = dict[tuple[str, int], Outcome]


def run(
    engine: EngineCore,
    requests: Sequence[GenerationRequest] | Mapping[int, Sequence[GenerationRequest]],
    *,
    aborts: Mapping[int, Sequence[str]] | None = None,
) -> Outcomes:
    """Run requests to their ends, with the engine's books checked after every step.

    Args:
      requests: all submitted at once, or by the step before which they come.
      aborts: request ids to abort, by the step before which that happens.
    """
    arrivals = dict(requests) if isinstance(requests, Mapping) else {0: requests}
    aborts = dict(aborts or {})
    outcomes: Outcomes = {}
    step = 0
    while arrivals or aborts or engine.has_work():
        for request in arrivals.pop(step, ()):
            engine.submit(request)
            outcomes |= {(request.request_id, i): Outcome() for i in range(request.params.n)}
        for request_id in aborts.pop(step, ()):
            engine.abort(request_id)
        for output in engine.step():
            outcomes[output.request_id, output.index].add(output)
        engine.check_integrity()
        step += 1
        assert step < 20_000, "no progress"
    assert_idle(engine)
    for key, outcome in outcomes.items():
        assert outcome.finish_reason is not None, f"{key} never ended"
    return outcomes


def assert_idle(engine: EngineCore) -> None:
    """Nothing is left of any request, and serving has compiled nothing."""
    stats = engine.stats
    assert not engine.has_work()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks, (
        f"{stats.num_blocks - stats.num_free_blocks} blocks leaked"
    )
    assert stats.serving_compilations == 0


def assert_as_solo(model: ServedModel, requests: Iterable[GenerationRequest], outcomes: Outcomes) -> None:
    """Every choice is what it is when its request runs alone; aborted ones are a beginning of it."""
    for request in requests:
        for index, solo in model.solo(request).items():
            assert_same(outcomes[request.request_id, index], solo, f"{request.request_id}:{index}")


def assert_same(actual: Outcome, solo: Outcome, name: str) -> None:
    """Equal tokens, text and end. A proven near-tie of the two best logits may part them; nothing else may."""
    aborted = actual.finish_reason is FinishReason.ABORT
    expected = solo.token_ids[: len(actual.token_ids)] if aborted else solo.token_ids
    parted = first_difference(actual.token_ids, expected)
    for at, entry in enumerate(actual.logprobs[:parted]):
        assert entry.token_id == actual.token_ids[at]
        assert abs(entry.logprob - solo.logprobs[at].logprob) < LOGPROB_TOLERANCE, (
            f"{name}: logprob of token {at}"
        )
        for (_, mine), (_, theirs) in zip(entry.top, solo.logprobs[at].top, strict=False):
            assert abs(mine - theirs) < LOGPROB_TOLERANCE, f"{name}: alternatives of token {at}"
    if parted is not None:
        assert parted < min(len(actual.token_ids), len(expected)), (
            f"{name} has {len(actual.token_ids)} tokens ({actual.finish_reason}), {len(expected)} alone"
        )
        (_, best), (_, second) = solo.logprobs[parted].top[:2]
        assert best - second < NEAR_TIE, (
            f"{name} differs from its solo run at token {parted} of {len(expected)}: "
            f"{actual.token_ids[parted]} for {expected[parted]}, margin {best - second:.2g}"
        )
        return
    if aborted:
        # An abort inside a stop string shows the part of it that was held back until then.
        stop = solo.stop_reason if isinstance(solo.stop_reason, str) else ""
        assert (solo.text + stop).startswith(actual.text.rstrip("\ufffd"))
        return
    assert actual.text == solo.text, f"{name}: the text differs"
    assert (actual.finish_reason, actual.stop_reason) == (solo.finish_reason, solo.stop_reason), name
    assert actual.error is None


def first_difference(actual: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one of them has; None where they are equal."""
    if list(actual) == list(expected):
        return None
    shorter = min(len(actual), len(expected))
    return next((i for i in range(shorter) if actual[i] != expected[i]), shorter)


def mixed_requests(model: ServedModel, prefix: str = "") -> list[GenerationRequest]:
    """One request of every kind, prompts of one token to several blocks and chunks, some with a common beginning."""
    name = lambda text: f"{prefix}{text}"  # noqa: E731
    shared = prompt_ids("shared", 45)
    plain = ask(name("plain"), 31, 40)
    (solo,) = model.solo(plain).values()
    stop_text = solo.text[len(solo.text) // 2 :].replace("\ufffd", "")[:4]
    assert stop_text in solo.text
    assert not solo.text.startswith(stop_text)
    sampled: dict[str, Any] = {"temperature": 0.9}
    return [
        plain,
        ask(name("one"), 1, 30),
        ask(name("long"), 100, 20, logprobs=2),
        ask(name("seeded"), 17, 32, seed=42, **sampled),
        ask(name("top_p"), 33, 24, seed=1, top_p=0.7, **sampled),
        ask(name("top_k"), 7, 24, seed=2, top_k=5, logprobs=0, **sampled),
        ask(name("min_p"), 8, 24, seed=3, min_p=0.05, **sampled),
        ask(name("filters"), 9, 24, seed=2**63, min_p=0.02, top_k=40, top_p=0.95, **sampled),
        ask(name("penalties"), 23, 24, presence_penalty=1.5, frequency_penalty=-1.0, repetition_penalty=1.4),
        ask(name("loop"), 12, 24, repetition_penalty=0.3),
        ask(name("bias"), 16, 20, logit_bias={int(solo.token_ids[0]): 3.0, 500: 8.0, 700: -100.0}),
        ask(
            name("min_tokens"), plain.prompt_token_ids, 30, min_tokens=12, stop_token_ids=solo.token_ids[:20]
        ),
        ask(name("stop_token"), plain.prompt_token_ids, 30, stop_token_ids=solo.token_ids[14:15]),
        ask(name("stop"), plain.prompt_token_ids, 40, stop=(stop_text,), logprobs=1),
        ask(name("n2"), 26, 18, n=2, seed=9, **sampled),
        ask(name("n3"), shared[:40], 12, n=3, seed=10, frequency_penalty=1.0, temperature=1.2),
        ask(name("json"), 21, 40, grammar=Grammar.json_schema(COLOURED), logprobs=1),
        ask(name("regex"), 14, 30, seed=11, grammar=Grammar(GrammarKind.REGEX, WORDS), **sampled),
        ask(name("choice"), 10, 12, n=2, seed=12, min_tokens=9, grammar=Grammar.choice(CHOICES), **sampled),
        ask(name("shared"), [*shared, 5000], 12),
        ask(name("scored"), [*shared, 6000, 6001], 9, prompt_logprobs=2, logprobs=3),
    ]
