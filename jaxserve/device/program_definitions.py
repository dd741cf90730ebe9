"""What the programs of an engine are. Everything that this file imports, directly or not, is part of their key.

Everything here works on shapes alone, so that programs can be made before, or without, any weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.layout import packed_size
from jaxserve.batch.masks import mask_words
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device import kv_cache
from jaxserve.device.draft import (
    DraftParams,
    DraftParts,
    Moving,
    draft_parts,
    draft_step,
    follow_step,
    observe_step,
)
from jaxserve.device.draft_model import DraftModel
from jaxserve.device.forward_batch import ForwardBatch, SamplingRows
from jaxserve.device.products import choose_exit_products, choose_products
from jaxserve.device.sampling import ROW_CHUNK, Logprobs, init_state, load_row
from jaxserve.device.step import DeviceState, Sampled, StepOutput, num_scored, serve_whole_step, step_parts
from jaxserve.device.step_parts import StepModel, StepParams, StepParts, split_model
from jaxserve.models.exit import Exit
from pallas_kernels.paged_attention import Backend, ragged_paged_attention

COPY_BLOCKS = "copy_blocks"
LOAD_ROW = "load_row"
GATHER_BLOCKS = "gather_blocks"
SCATTER_BLOCKS = "scatter_blocks"


@dataclass(frozen=True)
class DraftPrograms:
    """Those of what drafts (`device.draft`), as functions of abstract arrays.

    Attributes:
      what: see `DraftModel`.
      parts: a bucket's, as functions.
      model, params: as those of `Programs`; of a draft without layers of its own, the target's first ones.
      first_layer: where its layers begin in the KV cache.
      hidden: see `draft.observe_step`; None without an exit.
    """

    what: DraftModel
    parts: Callable[[Bucket], DraftParts]
    model: StepModel
    params: DraftParams
    first_layer: int
    hidden: jax.ShapeDtypeStruct | None

    def cache_of(self, state: DeviceState) -> kv_cache.KVCache:
        """Its part of the KV cache."""
        return state.kv_cache.part(self.first_layer, self.first_layer + len(self.model.layers))


@dataclass(frozen=True)
class Programs:
    """The programs of an engine, as functions of abstract arrays.

    Attributes:
      parts: a bucket's step as functions.
      by_layer: whether these become a program each (see `step_parts`), or one together.
      model: see `StepModel`.
      params: a model's parameters, state: everything that a step changes; both of `jax.ShapeDtypeStruct`.
      keep_logits: steps return their logits as well.
      swaps: there are programs that move blocks to host memory and back.
      draft: what drafts on the device, if anything does.
      identity: by name, all that decides what the programs are besides versions, code and device; for the manifest.
    """

    parts: Callable[[Bucket], StepParts]
    by_layer: bool
    model: StepModel
    params: StepParams
    state: DeviceState
    keep_logits: bool
    swaps: bool
    draft: DraftPrograms | None
    identity: dict[str, Any]

    @property
    def draft_model(self) -> DraftModel | None:
        """What drafts on the device, if anything does."""
        return self.draft.what if self.draft else None


def describe_programs(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    attention: Backend,
    num_blocks: int,
    platform: str,
    sharding: jax.sharding.Sharding,
    keep_logits: bool = False,
    draft: DraftModel | None = None,
) -> Programs:
    """The programs of an engine with this configuration.

    Args:
      num_blocks: usable KV blocks (the sink comes on top): part of the arrays' shapes.
      platform: what they will run on: "cpu", "gpu", ...
      sharding: of every array.
    """

    def cut_of(model: ModelConfig) -> tuple[StepModel, StepParams]:
        cut, params = split_model(
            model,
            dtype=jnp.dtype(config.dtype),
            deterministic=config.deterministic,
            quantization=config.quantization,
            change=partial(choose_products, attention=attention),
        )
        return cut, _placed(params, sharding)

    cut, params = cut_of(model)
    state = _placed(jax.eval_shape(lambda: make_state(model, config, num_blocks, draft)), sharding)
    attention_options = {"scale": model.head_dim**-0.5, "backend": attention}
    on_cpu = platform == "cpu"
    options = {"deterministic": config.deterministic, "keep_logits": keep_logits}
    rows_at_once = 1 if on_cpu else config.max_rows
    attend = _attend(**attention_options)
    identity = {
        "model": model,
        "attention": attention_options,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "deterministic": config.deterministic,
        "max_num_seqs": config.max_num_seqs,
        "block_size": config.block_size,
        "num_blocks": num_blocks,
        "rows_at_once": rows_at_once,
        "by_layer": on_cpu,
        "keep_logits": keep_logits,
        "draft": draft,
        "arrays": _digest((params, state)),
    }
    parts = lambda bucket: step_parts(cut, bucket, attend, rows_at_once, **options)  # noqa: E731
    drafting = None
    if draft is not None:
        num_layers = draft.model.num_layers
        own = cut_of(draft.model) if draft.is_own else (cut.first(num_layers), params.first(num_layers))
        drafting = _describe_draft(
            draft,
            *own,
            first_layer=model.num_layers if draft.is_own else 0,
            rows_at_once=rows_at_once,
            config=config,
            sharding=sharding,
        )
    swaps = config.host_memory > 0
    return Programs(parts, on_cpu, cut, params, state, keep_logits, swaps, drafting, identity)


def _describe_draft(
    draft: DraftModel,
    model: StepModel,
    params: StepParams,
    *,
    first_layer: int,
    rows_at_once: int,
    config: ResolvedConfig,
    sharding: jax.sharding.Sharding,
) -> DraftPrograms:
    attend = _attend(scale=draft.model.head_dim**-0.5, backend=draft.attention)
    exit_ = exit_state = hidden = None
    if (shape := draft.exit) is not None:
        dtype = jnp.dtype(config.dtype)
        build = lambda: choose_exit_products(Exit(shape, dtype=dtype, rngs=nnx.Rngs(0)), draft.attention)  # noqa: E731
        exit_, exit_state = nnx.split(nnx.eval_shape(build))
        exit_state = _placed(exit_state, sharding)
        hidden = _placed(jax.eval_shape(lambda: make_hidden(draft, config)), sharding)
    parts = lambda bucket: draft_parts(  # noqa: E731
        model, bucket, attend, rows_at_once, config.block_size, exit_
    )
    params = DraftParams(params.ends, params.layers, exit_state)
    return DraftPrograms(draft, parts, model, params, first_layer, hidden)


def make_hidden(draft: DraftModel | None, config: ResolvedConfig) -> jax.Array | None:
    """What `observe_step` keeps, before any step: [R, D]; None where nobody needs it."""
    if draft is None or draft.exit is None:
        return None
    return jnp.zeros((config.max_num_seqs + 1, draft.exit.hidden_size), jnp.dtype(config.dtype))


def _attend(*, scale: float, backend: Backend) -> Callable[..., jax.Array]:
    # A jit of its own, so that one program for a whole step traces attention once and not once a layer.
    return jax.jit(partial(ragged_paged_attention, scale=scale, backend=backend))


def _digest(arrays: Any) -> str:
    """Of their names, shapes and types; not of where they lie."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    described = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def make_state(
    model: ModelConfig, config: ResolvedConfig, num_blocks: int, draft: DraftModel | None = None
) -> DeviceState:
    """An empty device state; its last row of sampling state is for padding."""
    cached = draft.cached if draft else None
    return DeviceState(
        kv_cache=kv_cache.allocate(model, num_blocks, config.block_size, jnp.dtype(config.dtype), cached),
        sampling=init_state(config.max_num_seqs + 1, model.vocab_size),
        last_token_ids_R=jnp.zeros(config.max_num_seqs + 1, jnp.int32),
    )


@dataclass(frozen=True)
class Definition:
    """A program that can be made.

    Attributes:
      name: in the cache.
      donated: which arguments it may overwrite.
      arguments: abstract ones; some can only be had by tracing, so only when they are needed.
      in_tree: structure of ``((*arguments), {})``; out_tree: of the result.
    """

    name: str
    function: Callable[..., Any]
    donated: tuple[int, ...]
    arguments: Callable[[], tuple[Any, ...]]
    in_tree: Any
    out_tree: Any

    def compile(self) -> Any:
        """Trace, lower and compile it."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.arguments()).compile()


def _define(
    name: str,
    function: Callable[..., Any],
    donated: tuple[int, ...],
    like: tuple[Any, ...],
    *,
    result: Any,
    arguments: Callable[[], tuple[Any, ...]] | None = None,
) -> Definition:
    """`like`: the arguments; where `arguments` finds those, anything of their tree structure, as `result` is."""
    structure = jax.tree.structure
    return Definition(
        name, function, donated, arguments or (lambda: like), structure((like, {})), structure(result)
    )


def whole_step(programs: Programs, bucket: Bucket) -> Definition:
    allowed_SW = _masks(bucket, programs.state)
    arguments = (programs.params, programs.state, _ints(packed_size(bucket)), allowed_SW)
    result = (programs.state, StepOutput.structure(keep_logits=programs.keep_logits))
    function = partial(serve_whole_step, programs.parts(bucket))
    return _define(str(bucket), function, (1,), arguments, result=result)


def parts_of_step(programs: Programs, bucket: Bucket) -> dict[str, Definition]:
    """By part: "begin", "layer0", ... for each kind of layer, "select", "sample", "score"."""
    parts, params, state = programs.parts(bucket), programs.params, programs.state
    leaf, batch_like = 0, ForwardBatch.structure()
    sharding = _sharding_of(state)
    forward, begun = _forward(bucket, str(bucket), parts, programs.model, params, state.kv_cache, state)

    def select_arguments() -> tuple[Any, ...]:
        batch, x_TD, _ = begun()
        return params.ends, x_TD, batch

    selected = cache(lambda: _placed(jax.eval_shape(parts.select, *select_arguments()), sharding))

    def sample_arguments() -> tuple[Any, ...]:
        batch, _, _ = begun()
        hidden_SD, _, _ = selected()
        drawn = (state.sampling, state.last_token_ids_R)
        return params.ends, *drawn, hidden_SD, batch.sampling, batch.flags, _masks(bucket, state)

    def score_arguments() -> tuple[Any, ...]:
        batch, _, _ = begun()
        _, hidden_PD, targets_P = selected()
        return params.ends, hidden_PD, targets_P, batch.flags

    return {
        **forward,
        "select": _define(
            f"{bucket}.select",
            parts.select,
            (),
            (params.ends, leaf, batch_like),
            result=(leaf, leaf, leaf),
            arguments=select_arguments,
        ),
        "sample": _define(
            f"S{bucket.seqs}.sample",
            parts.sample,
            (1, 2),
            (params.ends, state.sampling, leaf, leaf, SamplingRows.structure(), leaf, leaf),
            result=(state.sampling, leaf, Sampled.structure(keep_logits=programs.keep_logits)),
            arguments=sample_arguments,
        ),
        "score": _define(
            f"P{num_scored(bucket.tokens)}.score",
            parts.score,
            (),
            (params.ends, leaf, leaf, leaf),
            result=Logprobs.structure(),
            arguments=score_arguments,
        ),
    }


def _forward(
    bucket: Bucket,
    name: str,
    parts: StepParts | DraftParts,
    model: StepModel,
    params: StepParams,
    cache_: kv_cache.KVCache,
    state: DeviceState,
) -> tuple[dict[str, Definition], Callable[[], Any]]:
    """("begin", "layer0", ... for each kind of layer; what `begin` gives, as shapes, which takes tracing)

    Args:
      name: what the programs' names begin with.
      cache_: of these layers.
    """
    first = (params.ends, state.last_token_ids_R, _ints(packed_size(bucket)))
    # Arrays that parts hand on, as tree structures.
    leaf, batch_like, shared_like = 0, ForwardBatch.structure(), (0,) * model.num_shared_arrays
    begun = cache(lambda: _placed(jax.eval_shape(parts.begin, *first), _sharding_of(state)))

    def layer(index: int, kind: int) -> Definition:
        weights, pool = params.layers[index], cache_.layer(index)

        def arguments() -> tuple[Any, ...]:
            batch, x_TD, shared = begun()
            return weights, pool, x_TD, shared, batch

        like = (weights, pool, leaf, shared_like, batch_like)
        return _define(
            f"{name}.layer{kind}", parts.layers[index], (1, 2), like, result=(pool, leaf), arguments=arguments
        )

    kinds = model.kinds
    definitions = {
        "begin": _define(f"{name}.begin", parts.begin, (), first, result=(batch_like, leaf, shared_like)),
        **{f"layer{kind}": layer(kinds.index(kind), kind) for kind in set(kinds)},
    }
    return definitions, begun


def parts_of_follow(programs: Programs, bucket: Bucket) -> dict[str, Definition]:
    """By part: "begin", "layer0", ..."""
    return _draft_forward(programs, bucket)[0]


def parts_of_draft(programs: Programs, bucket: Bucket) -> dict[str, Definition]:
    """By part: those of `parts_of_follow`, and "next"."""
    draft, state = _drafting(programs), programs.state
    forward, begun = _draft_forward(programs, bucket)
    leaf, shared_like = 0, (0,) * draft.model.num_shared_arrays

    first = (draft.params.ends, draft.params.exit, state.sampling)

    def arguments() -> tuple[Any, ...]:
        batch, x_TD, _ = begun()
        return *first, x_TD, batch, draft.hidden, *_draft_arguments(draft, bucket), _ints()

    like = (*first, leaf, ForwardBatch.structure(), draft.hidden, leaf, leaf, leaf)
    return {
        **forward,
        "next": _define(
            f"{bucket}.draft.next",
            draft.parts(bucket).next,
            (3, 7),
            like,
            result=(leaf, Moving.structure(), leaf, shared_like, draft.hidden),
            arguments=arguments,
        ),
    }


def whole_follow(programs: Programs, bucket: Bucket) -> Definition:
    draft, state = _drafting(programs), programs.state
    cache_ = draft.cache_of(state)
    arguments = (draft.params, cache_, state.last_token_ids_R, _ints(packed_size(bucket)))
    function = partial(follow_step, draft.parts(bucket))
    return _define(f"{bucket}.follow", function, (1,), arguments, result=cache_)


def whole_draft(programs: Programs, bucket: Bucket) -> Definition:
    draft, state = _drafting(programs), programs.state
    cache_ = draft.cache_of(state)
    packed = _ints(packed_size(bucket))
    last = _draft_arguments(draft, bucket)
    arguments = (
        draft.params,
        cache_,
        state.sampling,
        state.last_token_ids_R,
        draft.hidden,
        packed,
        *last,
    )
    function = partial(draft_step, draft.parts(bucket))
    return _define(f"{bucket}.draft", function, (1, 7), arguments, result=(cache_, 0))


def observe(programs: Programs, bucket: Bucket) -> Definition:
    hidden = _drafting(programs).hidden
    assert hidden is not None
    new = jax.ShapeDtypeStruct((bucket.seqs, hidden.shape[1]), hidden.dtype, sharding=hidden.sharding)
    arguments = (hidden, _ints(packed_size(bucket)), new, _ints(bucket.seqs))
    return _define(f"{bucket}.observe", partial(observe_step, bucket), (0,), arguments, result=hidden)


def _draft_forward(programs: Programs, bucket: Bucket) -> tuple[dict[str, Definition], Callable[[], Any]]:
    draft, state = _drafting(programs), programs.state
    # Without weights of its own it is the target's first layers, whose programs it shares.
    name = f"{bucket}.draft" if draft.what.is_own else str(bucket)
    parts = draft.parts(bucket)
    return _forward(bucket, name, parts, draft.model, draft.params, draft.cache_of(state), state)


def _draft_arguments(draft: DraftPrograms, bucket: Bucket) -> tuple[Any, Any]:
    """(lengths_S, drafts_KS)"""
    return _ints(bucket.seqs), _ints(draft.what.max_tokens, bucket.seqs)


def _drafting(programs: Programs) -> DraftPrograms:
    assert programs.draft is not None
    return programs.draft


def _sharding_of(state: DeviceState) -> jax.sharding.Sharding:
    [sharding] = {leaf.sharding for leaf in jax.tree.leaves(state)}
    return sharding


def state_program(programs: Programs, key: str) -> Definition:
    state = programs.state
    if key == COPY_BLOCKS:
        copies = (state.kv_cache, _ints(kv_cache.COPY_BATCH, 2))
        return _define(key, kv_cache.copy_blocks, (0,), copies, result=state.kv_cache)
    if key in (GATHER_BLOCKS, SCATTER_BLOCKS):
        pool, block_ids = state.kv_cache.k[0], _ints(kv_cache.SWAP_BATCH)
        values = sum(math.prod(each.shape[1:]) for each in jax.tree.leaves(state.kv_cache))
        shape = (kv_cache.SWAP_BATCH, values)
        blocks = jax.ShapeDtypeStruct(shape, pool.dtype, sharding=pool.sharding)
        if key == GATHER_BLOCKS:
            return _define(key, kv_cache.gather_blocks, (), (state.kv_cache, block_ids), result=0)
        into = (state.kv_cache, block_ids, blocks)
        return _define(key, kv_cache.scatter_blocks, (0,), into, result=(state.kv_cache, 0))
    assert key == LOAD_ROW
    values = jax.ShapeDtypeStruct((ROW_CHUNK,), jnp.float32)
    entries = (state.sampling, _ints(), _ints(), _ints(ROW_CHUNK), _ints(ROW_CHUNK), values)
    return _define(key, load_row, (0,), entries, result=state.sampling)


def _masks(bucket: Bucket, state: DeviceState) -> jax.ShapeDtypeStruct:
    """allowed_SW of `sampling.sample`."""
    like = state.sampling.token_info_RV
    shape = (bucket.seqs, mask_words(like.shape[-1]))
    return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=like.sharding)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
