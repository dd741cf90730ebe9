"""Compiles the whole `serve_step` of a `StepCase` from abstract weights: the same program that the engine compiles."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.layout import packed_size
from jaxserve.batch.masks import mask_words
from jaxserve.config import EngineConfig, resolve
from jaxserve.device.deviceless import target_sharding
from jaxserve.device.program_definitions import describe_programs
from jaxserve.device.step import DeviceState, serve_whole_step
from jaxserve.device.targets import TARGETS
from pallas_kernels.paged_attention import AttentionSpec, resolve_backend
from scripts.aot import hlo
from scripts.aot.cases import StepCase
from scripts.aot.deviceless import Compiled, compile_for
from scripts.aot.models import MODELS
from scripts.aot.results import StepFacts

BLOCK_SIZE = 16


def compile_step(case: StepCase) -> tuple[Compiled, StepFacts]:
    """Compile the step and look at the result."""
    target, model = TARGETS[case.target], MODELS[case.model]
    options = EngineConfig(
        max_model_len=case.context,
        max_num_seqs=case.seqs,
        max_num_batched_tokens=max(case.tokens, 2048),
        block_size=BLOCK_SIZE,
    )
    config = resolve(options, model, platform="gpu")
    spec = AttentionSpec(
        model.num_heads, model.num_kv_heads, model.head_dim, BLOCK_SIZE, config.dtype, config.dtype
    )
    backend = resolve_backend(case.backend, spec=spec, device=target.facts)
    programs = describe_programs(
        model,
        config,
        attention=backend,
        num_blocks=case.seqs * config.max_blocks_per_seq,
        platform="gpu",
        sharding=target_sharding(target),
    )
    bucket = Bucket(case.tokens, case.seqs, config.max_blocks_per_seq)
    packed = jax.ShapeDtypeStruct((packed_size(bucket),), jnp.int32)
    masks = jax.ShapeDtypeStruct((case.seqs, mask_words(model.vocab_size)), jnp.uint32)
    compiled = compile_for(
        target,
        partial(serve_whole_step, programs.parts(bucket)),
        (programs.params, programs.state, packed, masks),
        donate=(1,),
    )
    return compiled, _facts(compiled, programs.state)


def _facts(compiled: Compiled, state: DeviceState) -> StepFacts:
    text = compiled.executable.as_text()
    memory = compiled.executable.memory_analysis()
    of = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    keys = state.kv_cache.k[0]
    return StepFacts(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        state=of(state),
        caches=of(state.kv_cache),
        layer_keys=of(keys),
        copies=hlo.large_arrays_made(text, math.prod(keys.shape)),
        attention_calls=sum(hlo.is_pallas_call(line) for line in text.splitlines()),
    )
