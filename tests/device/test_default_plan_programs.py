"""The programs of a default plan, at its corners: none copies the cache, none needs more than the largest does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import pytest

from jaxserve.batch.buckets import Bucket, default_buckets
from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from jaxserve.device.attention import choose_attention
from jaxserve.device.program_definitions import COPY_BLOCKS, LOAD_ROW, describe_programs
from jaxserve.device.program_memory import temporary_bytes
from jaxserve.device.programs import ProgramMaker, program_keys
from scripts.aot import hlo

MODEL = ModelConfig("LlamaForCausalLM", 256, 32, 64, 1, 4, 2, 8, 512)
NUM_BLOCKS = 20_000  # a layer's keys weigh more than all else
FORMATS = [
    EngineConfig(dtype="float32", deterministic=True),
    EngineConfig(dtype="bfloat16"),
    EngineConfig(dtype="bfloat16", quantization="int8"),
]


def corners(config: ResolvedConfig) -> list[Bucket]:
    """Of all shapes: the largest and smallest, and the longest that has fewer rows than tokens by the most."""
    buckets = default_buckets(config).all_buckets()
    return sorted({buckets[0], buckets[-1], max(buckets, key=lambda b: (b.tokens / b.seqs, b.tokens))})


@pytest.fixture(scope="module", params=FORMATS, ids=lambda o: f"{o.dtype}-{o.quantization}")
def made(request: pytest.FixtureRequest) -> tuple[ResolvedConfig, Callable[[Any], Any]]:
    config = resolve(request.param, MODEL, platform="cpu")
    programs = describe_programs(
        MODEL,
        config,
        attention=choose_attention(MODEL, config),
        num_blocks=NUM_BLOCKS,
        platform="cpu",
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    return config, cache(ProgramMaker(programs, None))


def shapes_as_large_as_a_pool(text: str, size: int) -> Iterator[str]:
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


def test_no_program_makes_an_array_of_the_caches_size(
    made: tuple[ResolvedConfig, Callable[[Any], Any]],
) -> None:
    config, make = made
    size = (NUM_BLOCKS + 1) * MODEL.num_kv_heads * config.block_size * MODEL.head_dim
    for bucket in corners(config):
        parts = make(bucket).args[0]
        text = parts.layers[0].as_text()
        assert list(shapes_as_large_as_a_pool(text, size)) == [], bucket
        assert {0, 1} <= hlo.aliased_outputs(text).keys(), "keys and values are updated in place"
    text = make(COPY_BLOCKS).as_text()
    assert list(shapes_as_large_as_a_pool(text, size)) == []
    assert hlo.aliased_outputs(text) == {0: 0, 1: 1}


def test_the_largest_shape_needs_the_most(made: tuple[ResolvedConfig, Callable[[Any], Any]]) -> None:
    """Memory is planned by it alone, before the others exist."""
    config, make = made
    largest, *rest = program_keys(default_buckets(config))[:3]
    assert rest == [COPY_BLOCKS, LOAD_ROW]
    most = max(temporary_bytes(make(key)) for key in (largest, *rest))
    assert most > 0
    for bucket in corners(config):
        assert temporary_bytes(make(bucket)) <= most, bucket
