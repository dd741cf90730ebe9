"""The programs of a default plan, at its corners: none copies the cache, none needs more than the largest does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest

from jaxserve.batch.buckets import Bucket, default_buckets
from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.program_definitions import (
    COPY_BLOCKS,
    GATHER_BLOCKS,
    LOAD_ROW,
    SCATTER_BLOCKS,
    Programs,
    describe_programs,
    parts_of_step,
)
from jaxserve.device.program_memory import temporary_bytes
from jaxserve.device.programs import ProgramKey, ProgramMaker, program_keys
from scripts.aot import hlo

MODEL = ModelConfig("LlamaForCausalLM", 256, 32, 64, 1, 4, 2, 8, 512)
NUM_BLOCKS = 20_000  # a layer's keys weigh more than all else
FORMATS = [
    EngineConfig(dtype="float32", host_memory=10**6),
    EngineConfig(dtype="bfloat16", quantization="int8", host_memory=10**6),
]


def corners(config: ResolvedConfig) -> list[Bucket]:
    """Of all shapes: the largest and smallest, and the longest that has fewer rows than tokens by the most."""
    buckets = default_buckets(config).all_buckets()
    return sorted({buckets[0], buckets[-1], max(buckets, key=lambda b: (b.tokens / b.seqs, b.tokens))})


@dataclass(frozen=True)
class Made:
    """The programs of an engine with the default plan; each is compiled when it is asked for first."""

    config: ResolvedConfig
    programs: Programs
    maker: Callable[[ProgramKey], Any]

    def layer(self, bucket: Bucket) -> str:
        """The one part of a step that sees the cache, optimised."""
        text: str = parts_of_step(self.programs, bucket)["layer0"].compile().as_text()
        return text


@cache
def made(options: EngineConfig) -> Made:
    config = resolve(options, MODEL, platform="cpu")
    programs = describe_programs(
        MODEL,
        config,
        attention=choose_attention(MODEL, config),
        num_blocks=NUM_BLOCKS,
        platform="cpu",
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    return Made(config, programs, cache(ProgramMaker(programs, None)))


def arrays_as_large_as_a_pool(text: str, size: int) -> Iterator[str]:
    """Instructions that make an array of the pool's size otherwise than by writing into it."""
    _, computations = hlo.parse(text)
    for computation in computations.values():
        for instruction in computation.instructions:
            if instruction.shape is None or math.prod(instruction.shape) < size:
                continue
            opcode = instruction.opcode
            if opcode == "fusion":
                opcode = computations[instruction.called[0]].root.opcode
            if opcode not in (
                *("parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice", "tuple"),
                *("while", "conditional", "call"),
            ):
                yield instruction.text


@pytest.mark.parametrize("options", FORMATS, ids=lambda o: o.dtype)
def test_no_program_makes_an_array_of_the_caches_size(options: EngineConfig) -> None:
    """bfloat16 too: a CPU's compiler could widen a whole pool to write a few rows of it."""
    here = made(options)
    size = (NUM_BLOCKS + 1) * MODEL.num_kv_heads * here.config.block_size * MODEL.head_dim
    for bucket in corners(here.config):
        text = here.layer(bucket)
        assert list(arrays_as_large_as_a_pool(text, size)) == [], bucket
        assert {0, 1} <= hlo.aliased_outputs(text).keys(), "keys and values are updated in place"
    text = here.maker(COPY_BLOCKS).as_text()
    assert list(arrays_as_large_as_a_pool(text, size)) == []
    assert hlo.aliased_outputs(text) == {0: 0, 1: 1}
    text = here.maker(GATHER_BLOCKS).as_text()
    assert list(arrays_as_large_as_a_pool(text, size)) == []
    assert hlo.aliased_outputs(text) == {}
    text = here.maker(SCATTER_BLOCKS).as_text()
    assert list(arrays_as_large_as_a_pool(text, size)) == []
    assert hlo.aliased_outputs(text) == {0: 0, 1: 1}


def test_the_largest_shape_needs_the_most() -> None:
    """Memory is planned by it alone, before the others exist."""
    here = made(FORMATS[0])
    largest, *rest = program_keys(default_buckets(here.config), swaps=True)[:5]
    assert rest == [COPY_BLOCKS, LOAD_ROW, GATHER_BLOCKS, SCATTER_BLOCKS]
    most = max(temporary_bytes(here.maker(key)) for key in (largest, *rest))
    assert most > 0
    for bucket in corners(here.config)[1:]:  # the smallest's are tiny
        assert temporary_bytes(here.maker(bucket)) <= most, bucket
